"""`ngram_embedding`, from its arguments to its plan, and its module, with the state_dict of Qwen4-Exp's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import isqrt
from typing import Any

import torch
from npu_tiling import arguments
from npu_tiling.dispatch import Function, apply
from npu_tiling.dtensor import is_distributed
from npu_tiling.operators import Operator
from npu_tiling.plans import Plan, Slot
from torch import Tensor, nn

from .. import reference
from ..call import NO_ROW, Forward, NGram, numbers, signed
from ..lookup import LIBRARY, gradient_of_table
from ..rows import NAN_BITS, RowShape, as_bits, dense_rows, fill

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15  # of splitmix64
_SEED_OF_A_LAYER = 10007
_MAX_ROWS = 2**30  # of a table: sizes below are what the remainder on Ascend takes


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

        token_0[i] = ids[i]        token_k[i] = ids[i - k], or fill where it, or an id between the two, is EOS
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
        fill: the id in place of an EOS before token i, and of what stands before it; None: EOS.
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
    lengths, firsts = (numbers(name, each, table, "table's") for name, each in (("sizes", sizes), ("offsets", offsets)))
    factors = _factors(multipliers, table)
    arguments.shape("multipliers", factors, (*lengths.shape[: factors.dim() - 1], ngram_size))
    if not lengths.numel() or lengths.numel() % context:
        raise ValueError(f"sizes has {lengths.numel()} numbers and must have a multiple of ngram_size - 1, {context}.")
    arguments.shape("offsets", firsts, lengths.shape)
    arguments.one_of("mode", mode, ("concat", "sum"))
    arguments.one_of("mix", mix, ("xor", "sum"))
    arguments.flags(sparse=sparse)
    eos = signed("eos", eos, 32)
    fill = eos if fill is None else signed("fill", fill, 32)
    batches = ids.unsqueeze(0).flatten(0, -2)
    before = None if history is None else history.unsqueeze(0).flatten(0, -2)
    out, _ = NGRAM(
        NGram(
            ids=batches,
            history=before,
            table=table,
            multipliers=factors,
            sizes=lengths,
            offsets=firsts,
            eos=eos,
            fill=fill,
            add=mix == "sum",
            concat=mode == "concat",
            sparse=sparse,
        )
    )
    return out.view(*ids.shape, out.shape[-1])


def _factors(multipliers: Tensor | Sequence[int] | Sequence[Sequence[int]], table: Tensor) -> Tensor:
    """int64 [ngram_size], or [H, ngram_size], on the table's device."""
    name, of = "multipliers", "table's"
    given: Any = multipliers
    if isinstance(given, Tensor) and given.dim() == 2:
        return numbers(name, given.flatten(), table, of).view(given.shape)
    if isinstance(given, Sequence) and given and isinstance(given[0], Sequence):
        rows = [numbers(f"{name}[{head}]", row, table, of) for head, row in enumerate(given)]
        for head, row in enumerate(rows):
            arguments.shape(f"{name}[{head}]", row, rows[0].shape)
        return torch.stack(rows)
    return numbers(name, given, table, of)


def _check_tensors(ids: Tensor, table: Tensor, history: Tensor | None, ngram_size: int) -> None:
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


def plan(p: Plan, call: NGram) -> tuple[Slot, Slot]:
    """The rows that are found, and their numbers, int32 [H, B, T], -1 where the table has none: one launch."""
    from ..lookup.cuda import gather_tiling  # modules of kernels import Triton
    from . import ascend, cuda

    (n_rows, width), heads, context = call.table.shape, call.sizes.numel(), call.multipliers.shape[-1] - 1
    if n_rows >= _MAX_ROWS:
        raise ValueError(f"table has {n_rows} rows and must have fewer than {_MAX_ROWS} on {p.chip.name}.")
    out, rows = (p.new(each) for each in call.results().values())
    if not rows.numel() or not width:
        return out, fill(p, rows, -1)
    if not n_rows:  # a kernel takes no tensor without elements
        return fill(p, out, torch.nan), fill(p, rows, -1)
    on_cuda = p.chip.kind == "cuda"
    table, (n_batches, n_tokens) = dense_rows(p, call.table), call.ids.shape
    shape = RowShape(width=width, itemsize=table.dtype.itemsize, device=p.chip)
    chosen = gather_tiling(shape) if on_cuda else ascend.choose(shape, call.concat)
    tiling = p.decide("n-gram embedding", chosen)
    count = {"n": n_batches * n_tokens} if on_cuda else {"n_batches": n_batches}
    module: Any = cuda if on_cuda else ascend
    p.launch(
        module.ngram_rows_kernel,
        "n-gram embedding",
        module.grid(tiling, n_batches, n_tokens, heads if call.concat else 1),
        reads={
            **p.fields(call, "ids", "history", "multipliers", "sizes", "offsets"),
            "p_table": as_bits(p, table) if call.concat else table,
        },
        writes={"p_out": as_bits(p, out) if call.concat else out, "p_rows": rows},
        sizes={
            **count,
            "n_tokens": n_tokens,
            "n_rows": n_rows,
            "eos": call.eos,
            "fill": call.fill,
            "s_table": table.strides[0],
        },
        flags={
            "CONTEXT": context,
            "HEADS": heads // context,
            "ADD": call.add,
            "CONCAT": call.concat,
            "OWN": call.multipliers.dim() == 2,
            "NAN": NAN_BITS[table.dtype],
        },
    )
    return out, rows


NGRAM = Operator(LIBRARY, "ngram", NGram, ["out", "rows"], plan=plan, reference=reference.ngram)


class _NGram(Function):
    @staticmethod
    def forward(ctx, run, ids, history, table, multipliers, sizes, offsets, *options):  # type: ignore[no-untyped-def]
        out, rows = run(ids, history, table, multipliers, sizes, offsets, *options)
        ctx.save_for_backward(rows)
        ctx.mark_non_differentiable(rows)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.shape = NGram(None, None, None, None, None, None, *options), table.shape
        return out, rows

    @staticmethod
    def backward(ctx, dy, _):  # type: ignore[no-untyped-def]
        dtable = None
        if dy is not None:
            (rows,) = ctx.saved_tensors
            n_rows, width = ctx.shape
            # [H, B * T, D]: a head's part of dy, or all of it for each.
            heads, n = rows.shape[0], rows.shape[1] * rows.shape[2]
            if ctx.call.concat:
                dy = dy.reshape(n, heads, width).transpose(0, 1)
            else:
                dy = dy.reshape(n, width).expand(heads, n, width)
            look_up = Forward(None, None, NO_ROW, False, ctx.call.sparse, first_row=0, n_total=n_rows)
            dtable = gradient_of_table(look_up, dy, rows.flatten(1), n_rows, dy.dtype)
        return None, None, None, dtable, *[None] * 8


NGRAM.autograd(partial(apply, _NGram), as_given=True)


class NGramEmbedding(nn.Module):
    """Rows that n-grams of tokens name by a hash, concatenated: `ngram_embedding` with its tables and numbers.

    Parameters and buffers have the names, shapes and values of transformers' `Qwen4ExpTextNGramEmbedding`, so that its
    state_dict loads: `ngram_embedding.weight`, `layer_multipliers`, `ngram_heads_vocab_sizes` and `ngram_heads_offsets`.

    Args:
        vocab_size: ids of tokens; multipliers are so small that no product with an id overflows 63 bits.
        embedding_dim: of the result, a multiple of the number of heads.
        eos: see `ngram_embedding`.
        ngram_size: tokens of the longest n-gram.
        heads_per_ngram: heads of each length of n-gram.
        table_size: the heads' tables have as many rows as the primes from here on, one prime for each head of all layers.
        layer_index: which of the layers with n-grams this is.
        seed: of the multipliers.
        divisible_by: rows of the padded table are a multiple.
        sparse: see `ngram_embedding`.
        device, dtype: of the table.

    Raises:
        TypeError: an argument has a type that is not supported.
        ValueError: a number is out of range.
    """

    layer_multipliers: Tensor
    ngram_heads_vocab_sizes: Tensor
    ngram_heads_offsets: Tensor

    def __init__(
        self,
        vocab_size: int,
        embedding_dim: int,
        eos: int,
        *,
        ngram_size: int = 3,
        heads_per_ngram: int = 8,
        table_size: int = 20_000_000,
        layer_index: int = 0,
        seed: int = 1234,
        divisible_by: int = 128,
        sparse: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        vocab_size = arguments.whole("vocab_size", vocab_size, least=0)
        embedding_dim = arguments.whole("embedding_dim", embedding_dim, least=0)
        eos = signed("eos", eos, 32)
        ngram_size = arguments.whole("ngram_size", ngram_size, least=2)
        heads_per_ngram = arguments.whole("heads_per_ngram", heads_per_ngram, least=1)
        table_size = arguments.whole("table_size", table_size, least=2)
        layer_index = arguments.whole("layer_index", layer_index, least=0)
        seed = arguments.whole("seed", seed)
        divisible_by = arguments.whole("divisible_by", divisible_by, least=1)
        arguments.flags(sparse=sparse)
        heads = (ngram_size - 1) * heads_per_ngram
        if embedding_dim % heads:
            raise ValueError(f"embedding_dim is {embedding_dim} and must be a multiple of {heads}, the number of heads.")
        self.eos, self.ngram_size, self.sparse = eos, ngram_size, sparse
        sizes = primes(table_size, layer_index * heads, heads)
        rows = -(-sum(sizes) // divisible_by) * divisible_by
        offsets = [sum(sizes[:head]) for head in range(heads)]
        self._numbers = {
            "layer_multipliers": multipliers(vocab_size, ngram_size, layer_index, seed),
            "ngram_heads_vocab_sizes": sizes,
            "ngram_heads_offsets": offsets,
        }
        for name, values in self._numbers.items():
            self.register_buffer(name, torch.tensor(values, dtype=torch.int64, device=device))
        self.ngram_embedding = nn.Embedding(rows, embedding_dim // heads, sparse=sparse, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Fills in the multipliers, sizes and offsets, for a module made on the meta device; the table has its own reset."""
        for name, values in self._numbers.items():
            buffer = self.get_buffer(name)
            buffer.copy_(torch.tensor(values, device=buffer.device))

    def forward(self, ids: Tensor, history: Tensor | None = None) -> Tensor:
        """[..., T, embedding_dim] for ids [..., T], after the ids `history` [..., ngram_size - 1]."""
        return ngram_rows_of(self, ids, history, self.eos, self.sparse)


def ngram_rows_of(module: Any, ids: Tensor, history: Tensor | None, eos: int, sparse: bool) -> Tensor:
    """`ngram_embedding` of a module that has the tables and numbers of `NGramEmbedding`."""
    numbers = (module.layer_multipliers, module.ngram_heads_vocab_sizes, module.ngram_heads_offsets)
    table = module.ngram_embedding.weight
    return ngram_embedding(ids, table, *numbers, eos, module.ngram_size, history, sparse=sparse)


def multipliers(vocab_size: int, count: int, layer_index: int, seed: int) -> list[int]:
    """Odd numbers drawn by splitmix64, so small that no product with an id reaches 2^63."""
    bound = max(1, (2**63 - 1) // max(vocab_size, 1) // 2)
    first = seed + _SEED_OF_A_LAYER * layer_index
    return [2 * (_splitmix64(first + _GAMMA * (index + 1)) % bound) + 1 for index in range(count)]


def _splitmix64(state: int) -> int:
    """The number that follows a state. Source: Steele et al., "Fast splittable pseudorandom number generators"."""
    mixed = (state + _GAMMA) & _MASK
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & _MASK
    return mixed ^ (mixed >> 31)


def primes(first: int, skipped: int, count: int) -> list[int]:
    """`count` primes from `first` on, after the first `skipped` of them."""
    found: list[int] = []
    number = first
    while len(found) < skipped + count:
        if number == 2 or (number % 2 and all(number % divisor for divisor in range(3, isqrt(number) + 1, 2))):
            found.append(number)
        number += 1
    return found[skipped:]
