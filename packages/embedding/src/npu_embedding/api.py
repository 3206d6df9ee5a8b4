"""`embedding`, from its arguments to an operator, and its module: a drop-in for torch.nn.Embedding."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from npu_tiling import arguments
from npu_tiling.dtensor import is_distributed
from npu_tiling.models import stands_for
from torch import Tensor, nn

from . import split
from .bags import computed_rows
from .call import NO_ROW, Forward, Renormalise, check_inside, check_table, padding_row
from .lookup import FORWARD, RENORMALISE, largest_norm

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_UNKNOWN_TOTAL = 2**63 - 1  # rows of a sharded table: any index from 0 may be another shard's


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
    multiplier: float | None = None,
    rms_norm_eps: float | None = None,
    row_scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Rows of a table, by index: `torch.nn.functional.embedding`.

        out[...] = weight[indices[...]]        dweight[r] = sum of dy over the positions whose index is r
        out[...] = multiplier * row_scales[indices[...]] * weight[indices[...]]        where they are given, in one launch
        out[...] = x / sqrt(mean(x^2) + rms_norm_eps)        of that x, in the same launch, where it is given

    Without them a row of the output is a copy, bit for bit, whatever the other indices are. The gradient's sums are fp32,
    rounded once, and the same bits every time. Nothing waits for the device. Under autocast nothing is cast. DTensors: see
    split.py.

    An index outside the table: on a CPU an IndexError that names it. On an accelerator that row of the output is NaN and
    gives no gradient; nothing outside the table is read or written.

    Args:
        indices: [...], int32 or int64, at any strides.
        weight: [V, D], fp32, bf16 or fp16 (fp64 too on a CPU); with `row_scales` int8, float8_e4m3fn or float8_e5m2, which
            have no gradient. Rows may lie at any stride.
        padding_idx: this row gets no gradient; its output is the row as it is. Negative: counted from the end.
        max_norm: rows that an index names and whose norm is larger are scaled down to it, in place, before the look-up.
        norm_type: the p of that norm.
        scale_grad_by_freq: the gradient of a row is divided by how many indices name it.
        sparse: the gradient of `weight` is a sparse tensor: one entry for each index, in the order of their rows. It is not
            coalesced, which would have the host wait. Each row's sum, rounded once, is in the first of its entries, with
            zeros in the others and in those of the padding row. With inductor a compiled graph may have one look-up in a
            table, as of torch's own.
        vocab_range: (first, last): `weight` holds rows `first` to `last - 1` of a table that is split over devices. Other
            rows come out as zeros, -0.0 in a plain look-up, and get no gradient: the sum over all devices is the whole
            look-up. `padding_idx` counts in the whole table.
        num_embeddings: rows of the whole table. With it an index past them is outside the table; without it only a negative
            index is.
        multiplier: of every row, in fp32, rounded once, as in Gemma. Transformers' Gemma rounds it to weight's dtype first.
            The gradient of a row is `multiplier * dy`, rounded to weight's dtype, before it is summed.
        rms_norm_eps: of an RMSNorm of each row, without a weight, in fp32, rounded once. The gradient of a row is rounded
            to weight's dtype, before it is summed. It has a launch of its own. On accelerators rows of more columns than a
            program holds are normalised by PyTorch.
        row_scales: [V], fp32, bf16 or fp16: a factor for each row, in fp32.
        dtype: of the result, with `row_scales`; None: theirs.

    Returns:
        [..., D] in weight's dtype, or `dtype`, contiguous.

    Raises:
        TypeError: an argument has a type or dtype that is not supported.
        ValueError: shapes or devices do not match, or an option is out of range.
        IndexError: an index is outside the table (CPU).

    Source: torch.nn.functional.embedding; for `vocab_range`, Shoeybi et al., "Megatron-LM", arXiv 1909.08053.
    """
    if (
        max_norm is None and multiplier is None and rms_norm_eps is None and row_scales is None
        and vocab_range is None and num_embeddings is None and dtype is None
        and type(norm_type) is float and isinstance(weight, Tensor) and weight.dim() == 2
        and (padding_idx is None or (type(padding_idx) is int and padding_idx >= 0))
    ):  # fmt: skip
        row = NO_ROW if padding_idx is None else padding_idx
        call = Forward(indices, weight, row, scale_grad_by_freq, sparse, 0, weight.shape[0])
        found = FORWARD.if_checked(norm_type, call)  # norm_type is no field of the call, and was checked with it
        if found is not None:
            rows: Tensor = found
            return rows
    dtype = check_table(indices, weight, row_scales, dtype)
    first_row, n_total = _check(weight, vocab_range, num_embeddings)
    padding = padding_row(padding_idx, weight.shape[0] if vocab_range is None else num_embeddings)
    if multiplier is not None:
        multiplier = arguments.number("multiplier", multiplier, or_none=True)
    if rms_norm_eps is not None:
        rms_norm_eps = arguments.number("rms_norm_eps", rms_norm_eps, least=0)
    if max_norm is not None:
        max_norm = largest_norm(max_norm, row_scales)
    norm_type = arguments.number("norm_type", norm_type, finite=False)
    arguments.flags(scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)
    if is_distributed((indices, weight)):
        if row_scales is not None:
            raise ValueError("row_scales is given and must be None where weight is a DTensor.")
        if rms_norm_eps is not None:
            raise ValueError(f"rms_norm_eps is {rms_norm_eps} and must be None where weight is a DTensor.")
        if vocab_range is not None:
            raise ValueError(f"vocab_range is {vocab_range} and must be left out where weight is a DTensor.")
        run = partial(embedding, norm_type=norm_type)
        return split.of_dtensors(run, indices, weight, padding_idx, max_norm, scale_grad_by_freq, sparse, multiplier)
    if max_norm is not None:
        RENORMALISE(Renormalise(indices, weight.detach(), max_norm, norm_type, first_row, n_total))
    call = Forward(indices, weight, padding, scale_grad_by_freq, sparse, first_row, n_total)
    if multiplier is not None or row_scales is not None or rms_norm_eps is not None:
        check_inside(indices, n_total)
        return computed_rows(call, row_scales, 1.0 if multiplier is None else multiplier, rms_norm_eps, dtype)
    out: Tensor = FORWARD(call, norm_type)
    return out


class Embedding(nn.Embedding):
    """torch.nn.Embedding, with `npu_embedding.embedding` for its forward and its gradient.

    Arguments, attributes, `from_pretrained`, initial values and state_dict are those of torch.nn.Embedding. The forward of
    that class runs, with a warning, where ours cannot stand for it: its weight was quantised, that forward was replaced, a
    TorchFunctionMode would see other calls. It also runs while the module is traced or exported to ONNX.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Rows [..., embedding_dim] for indices [...]."""
        if not stands_for(self, nn.Embedding, other_dtype(self), input=input, weight=self.weight):
            return nn.Embedding.forward(self, input)
        return embedding(
            input,
            self.weight,
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )


def _check(weight: Tensor, vocab_range: tuple[int, int] | None, num_embeddings: int | None) -> tuple[int, int]:
    """The first row of `weight` in the whole table, and the number of rows of the whole table."""
    rows = weight.shape[0]
    if vocab_range is None:
        if num_embeddings is not None:
            raise ValueError(f"num_embeddings is {num_embeddings} and must be left out where vocab_range is.")
        return 0, rows
    first, last = arguments.span("vocab_range", vocab_range)
    if not 0 <= first <= last < _UNKNOWN_TOTAL or last - first != rows:
        raise ValueError(
            f"vocab_range is {(first, last)} and must be (first, first + {rows}), weight's rows, from 0 up and below 2^63."
        )
    if num_embeddings is None:
        return first, _UNKNOWN_TOTAL
    if not last <= arguments.whole("num_embeddings", num_embeddings) < _UNKNOWN_TOTAL:
        raise ValueError(
            f"num_embeddings is {num_embeddings} and must be at least {last}, where vocab_range ends, and below 2^63."
        )
    return first, num_embeddings


def other_dtype(table: Any) -> str | None:
    """Why `embedding` does not look up rows of a table with this dtype, None if it does."""
    dtype = table.weight.dtype  # while torch.fx traces it is none
    is_other = isinstance(dtype, torch.dtype) and dtype not in _DTYPES
    return f"its weight is {dtype}, which embedding does not take" if is_other else None
