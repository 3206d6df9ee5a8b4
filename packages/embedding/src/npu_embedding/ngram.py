"""The n-gram look-up: it checks its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from npu_tiling.pytorch import arguments
from npu_tiling.pytorch.sharding import is_distributed
from torch import Tensor

from . import checks
from .operators import OPERATORS


def ngram_embedding(
    ids: Tensor,
    table: Tensor,
    multipliers: Tensor | Sequence[int] | Sequence[Sequence[int]],
    sizes: Tensor | Sequence[int],
    offsets: Tensor | Sequence[int],
    eos: int,
    ngram_size: int,
    history: Tensor | None = None,
    *,
    mode: str = "concat",
    mix: str = "xor",
    fill: int | None = None,
    sparse: bool = False,
) -> Tensor:
    """Rows of a table that n-grams of tokens name by a hash, several heads for each length of n-gram from 2.

        token_k[i] = ids[i - k], or fill where it, or an id between the two, is EOS
        row_h[i] = offsets[h] + (XOR over k < n of token_k[i] * multipliers[k]) mod sizes[h]
        out[i] = table[row_0[i]], ..., table[row_H-1[i]], concatenated (mode "concat") or added (mode "sum")

    where head h is of n-grams of n = 2 + h // (H / (ngram_size - 1)) tokens. Products are those of 64-bit integers, modulo
    2^64; the remainder is from 0 to sizes[h] - 1. Before the first id stands the history, or EOS. Hash, look-up and
    concatenation are one launch. The gradient of `table` is that of `embedding`: fp32 sums in a fixed order, the same bits
    every time.

    A head whose rows the table does not have: on a CPU a ValueError; an accelerator gives NaN there, and no gradient.

    Args:
        ids: [..., T], int32 or int64, from -2^31 to 2^31 - 1: sequences of tokens.
        table: [V, D], fp32, bf16 or fp16 (fp64 too on a CPU): the tables of all heads, one after the other. Rows may lie at
            any stride. Fewer than 2^30 rows on accelerators.
        multipliers: [ngram_size], int64; or [H, ngram_size], those of each head.
        sizes: [H], int64: rows of each head, mostly primes. H is a multiple of ngram_size - 1.
        offsets: [H], int64: the first row of each head.
        eos: the id that ends a text. An n-gram holds nothing from before it.
        ngram_size: tokens of the longest n-gram, at least 2.
        history: [..., ngram_size - 1], in ids' dtype: the ids before `ids`, to decode with.
        mode: "concat" or "sum" (in fp32, rounded once).
        mix: "xor" or "sum" of the products.
        fill: the id in place of EOS and what stands before it; None: EOS.
        sparse: the gradient of `table` is a sparse tensor, as with `embedding`.

    Returns:
        [..., T, H * D], or [..., T, D] for the sum, in table's dtype.

    Raises:
        TypeError: an argument has a type or dtype that is not supported.
        ValueError: shapes, devices or numbers do not match.

    Source: `Qwen4ExpTextNGramEmbedding` of transformers 5.23; "Conditional Memory via Scalable Lookup" (Engram).
    """
    _check_tensors(ids, table, history, ngram_size)
    if is_distributed((ids, table)):
        raise TypeError("table or ids is a DTensor and must be a plain tensor.")
    context = ngram_size - 1
    lengths, firsts = (
        checks.numbers(name, each, table, "table's") for name, each in (("sizes", sizes), ("offsets", offsets))
    )
    factors = _factors(multipliers, table)
    arguments.shape("multipliers", factors, (*lengths.shape[: factors.dim() - 1], ngram_size))
    if not lengths.numel() or lengths.numel() % context:
        raise ValueError(f"sizes has {lengths.numel()} numbers and must have a multiple of ngram_size - 1, {context}.")
    arguments.shape("offsets", firsts, lengths.shape)
    arguments.one_of("mode", mode, ("concat", "sum"))
    arguments.one_of("mix", mix, ("xor", "sum"))
    arguments.flags(sparse=sparse)
    eos = checks.signed("eos", eos, 32)
    fill = eos if fill is None else checks.signed("fill", fill, 32)
    batches = ids.unsqueeze(0).flatten(0, -2)
    before = None if history is None else history.unsqueeze(0).flatten(0, -2)
    options = (eos, fill, mix == "sum", mode == "concat", sparse)
    out, _ = OPERATORS("ngram", batches, before, table, factors, lengths, firsts, *options)
    return out.view(*ids.shape, out.shape[-1])


def _factors(multipliers: Tensor | Sequence[int] | Sequence[Sequence[int]], table: Tensor) -> Tensor:
    """int64 [ngram_size], or [H, ngram_size], on the table's device."""
    name, of = "multipliers", "table's"
    given: Any = multipliers
    if isinstance(given, Tensor) and given.dim() == 2:
        return checks.numbers(name, given.flatten(), table, of).view(given.shape)
    if isinstance(given, Sequence) and given and isinstance(given[0], Sequence):
        rows = [checks.numbers(f"{name}[{head}]", row, table, of) for head, row in enumerate(given)]
        for head, row in enumerate(rows):
            arguments.shape(f"{name}[{head}]", row, rows[0].shape)
        return torch.stack(rows)
    return checks.numbers(name, given, table, of)


def _check_tensors(ids: Tensor, table: Tensor, history: Tensor | None, ngram_size: int) -> None:
    arguments.tensor("ids", ids)
    arguments.dtype("ids", ids, torch.int32, torch.int64)
    if not ids.dim():
        raise ValueError("ids has shape () and must have a last dimension of tokens.")
    arguments.floating("table", table)
    if table.dim() != 2:
        raise ValueError(f"table has shape {tuple(table.shape)} and must have two dimensions.")
    arguments.device("ids", ids, table, "table's")
    arguments.whole("ngram_size", ngram_size, least=2)
    arguments.tensor("history", history, or_none=True)
    if history is not None:
        arguments.dtype("history", history, ids.dtype)
        arguments.shape("history", history, (*ids.shape[:-1], ngram_size - 1))
        arguments.device("history", history, table, "table's")
