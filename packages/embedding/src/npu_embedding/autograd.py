"""The embedding and its gradient: the public function, which checks its arguments, and the autograd of the operators."""

from __future__ import annotations

from functools import partial

import torch
from npu_tiling.pytorch import arguments
from npu_tiling.pytorch.autograd import Function, apply, needs_gradient
from npu_tiling.pytorch.sharding import is_distributed
from torch import Tensor

from . import sharding
from .operators import OPERATORS

_ANY_TOTAL = 2**63 - 1  # a sharded table of unknown size: every index but a negative one may be another shard's


def embedding(
    indices: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    vocab_range: tuple[int, int] | None = None,
    num_embeddings: int | None = None,
) -> Tensor:
    """Rows of a table, by index: `torch.nn.functional.embedding`.

        out[...] = weight[indices[...]]        dweight[r] = sum of dy over the positions whose index is r

    A row of the output is a copy, bit for bit, whatever the other indices are.
    The gradient's sums are fp32, rounded once, and the same bits every time: equal indices are brought together by a stable
    sort and added in a fixed order. Nothing waits for the device. Under autocast nothing is cast. DTensors: see sharding.py.

    An index outside the table: on a CPU an IndexError that names it. On an accelerator, which no error can come back from
    without waiting, nothing outside the table is read or written; that row of the output is NaN, so that the loss is too,
    and gives no gradient.

    Args:
        indices: [...], int32 or int64, at any strides.
        weight: [V, D], fp32, bf16 or fp16 (fp64 too on a CPU). Rows may lie at any stride.
        padding_idx: this row gets no gradient; its output is the row as it is. Negative: counted from the end.
        max_norm: rows that are named and have a larger norm are scaled down to it, in place, before the look-up.
        norm_type: the p of that norm.
        scale_grad_by_freq: the gradient of a row is divided by how often the row was named.
        sparse: the gradient of `weight` is a sparse tensor: one entry for each index, in the order of their rows, no dense
            table in between. It is not coalesced, since how many rows are distinct is known to the device alone and asking
            would wait for it. But each row's sum, rounded once, is in the first of its entries, with zeros in the others and
            in those of the padding row, so that to coalesce it, which optimizers do, adds nothing but zeros. Not under
            torch.compile.
        vocab_range: (first, last): `weight` holds rows `first` to `last - 1` of a table that is split over devices. Other
            rows come out as zeros and get no gradient; the sum over all devices is the whole look-up. `padding_idx` counts
            in the whole table.
        num_embeddings: rows of that whole table. Where it is given, an index past it is outside the table; otherwise only a
            negative one is.

    Returns:
        [..., D] in weight's dtype, contiguous.

    Raises:
        TypeError: an argument has a type or dtype that is not supported.
        ValueError: shapes or devices do not match, or an option is out of range.
        IndexError: an index is outside the table (CPU).

    Source: torch.nn.functional.embedding; for `vocab_range`, Shoeybi et al., "Megatron-LM", arXiv 1909.08053.
    """
    first, n_total = _check(indices, weight, vocab_range, num_embeddings)
    padding = _padding_row(padding_idx, weight.shape[0] if vocab_range is None else num_embeddings)
    max_norm = arguments.number("max_norm", max_norm, least=0, finite=False, or_none=True)
    norm_type = arguments.number("norm_type", norm_type, finite=False)
    arguments.flags(scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)
    if is_distributed((indices, weight)):
        if vocab_range is not None:
            raise ValueError(f"vocab_range is {vocab_range} and must be left out where weight is a DTensor.")
        run = partial(embedding, padding_idx=padding_idx, norm_type=norm_type)
        return sharding.embedding(run, indices, weight, max_norm, scale_grad_by_freq, sparse)
    if max_norm is not None:
        with torch.no_grad():
            OPERATORS("renormalise_", indices, weight, max_norm, norm_type, first, n_total)
    return OPERATORS("embedding", indices, weight, padding, scale_grad_by_freq, sparse, first, n_total)


def _check(
    indices: Tensor, weight: Tensor, vocab_range: tuple[int, int] | None, num_embeddings: int | None
) -> tuple[int, int]:
    """The first row that weight holds, and how many the whole table has."""
    arguments.tensor("indices", indices)
    arguments.dtype("indices", indices, torch.int32, torch.int64)
    arguments.floating("weight", weight)
    if weight.dim() != 2:
        raise ValueError(f"weight has shape {tuple(weight.shape)} and must have two dimensions.")
    arguments.device("indices", indices, weight, "weight's")
    rows = weight.shape[0]
    if vocab_range is None:
        if num_embeddings is not None:
            raise ValueError(f"num_embeddings is {num_embeddings} and must be left out where vocab_range is.")
        return 0, rows
    first, last = arguments.span("vocab_range", vocab_range)
    if not 0 <= first <= last or last - first != rows:
        raise ValueError(f"vocab_range is {(first, last)} and must be (first, first + {rows}), weight's rows, from 0 up.")
    if num_embeddings is None:
        return first, _ANY_TOTAL
    if arguments.whole("num_embeddings", num_embeddings) < last:
        raise ValueError(f"num_embeddings is {num_embeddings} and must be at least {last}, where vocab_range ends.")
    return first, num_embeddings


def _padding_row(padding_idx: int | None, rows: int | None) -> int:
    """padding_idx counted from the start, -1 for none; `rows` is None where nobody said how many there are."""
    if arguments.whole("padding_idx", padding_idx, or_none=True) is None:
        return -1
    assert padding_idx is not None
    if rows is None:
        if padding_idx < 0:
            raise ValueError(f"padding_idx is {padding_idx} and must be at least 0 where num_embeddings is not given.")
        return padding_idx
    if not -rows <= padding_idx < rows:
        raise ValueError(f"padding_idx is {padding_idx} and must be from {-rows} to {rows - 1}.")
    return padding_idx % rows


class _Embedding(Function):
    @staticmethod
    def forward(ctx, indices, weight, padding_idx, scale_grad_by_freq, sparse, first, n_total):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(indices)
        ctx.sparse = sparse
        ctx.options = (weight.shape[0], padding_idx, scale_grad_by_freq, first)
        ctx.set_materialize_grads(False)
        options = (padding_idx, scale_grad_by_freq, sparse, first, n_total)
        return OPERATORS.below_autograd("embedding", indices, weight, *options)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        dweight = None
        if dy is not None:
            (indices,) = ctx.saved_tensors
            if ctx.sparse:
                values, rows = OPERATORS("embedding_sparse_backward", dy, indices, *ctx.options)
                shape = (ctx.options[0], dy.shape[-1])
                dweight = torch.sparse_coo_tensor(rows.unsqueeze(0), values, shape, check_invariants=False)
            else:
                dweight = OPERATORS("embedding_backward", dy, indices, *ctx.options)
        return None, dweight, None, None, None, None, None


def _embedding(indices, weight, *options):  # type: ignore[no-untyped-def]
    if needs_gradient((weight,)):
        return apply(_Embedding, indices, weight, *options)
    return OPERATORS.below_autograd("embedding", indices, weight, *options)


OPERATORS.autograd("embedding", _embedding)
OPERATORS.gradient("embedding_backward")
OPERATORS.gradient("embedding_sparse_backward")
OPERATORS.autograd("renormalise_", lambda *arguments: OPERATORS.below_autograd("renormalise_", *arguments))
