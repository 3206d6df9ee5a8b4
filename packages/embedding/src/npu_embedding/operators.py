"""The operators registered with PyTorch, in its namespace `npu_embedding`, and their autograd.

`forward` is the look-up and `backward` its gradient, dense or, for `sparse`, an entry for each index: kernels on
accelerators, reference.py on a CPU. `renormalise_` is PyTorch everywhere. A table is rows `first_row` to
`first_row + V - 1` of `n_total`; `padding_idx` is NO_ROW for none. Of the forward's arguments autograd alone reads
`padding_idx`, `scale_grad_by_freq` and `sparse`.

`ngram` looks up rows that it finds by hashing; its gradient is `backward`, of the rows that it found.
"""

from __future__ import annotations

import torch
from npu_tiling import device_for
from npu_tiling.pytorch.autograd import Function, apply, forward_mode, needs_gradient
from npu_tiling.pytorch.library import OperatorLibrary
from torch import Tensor

from . import reference
from .launch import lookup, ngram
from .shape import NO_ROW

OPERATORS = OperatorLibrary("npu_embedding")
_GRADIENT = "SymInt padding_idx, bool scale_grad_by_freq, bool sparse, SymInt first_row"


def forward(
    indices: Tensor,
    weight: Tensor,
    padding_idx: int,
    scale_grad_by_freq: bool,
    sparse: bool,
    first_row: int,
    n_total: int,
) -> Tensor:
    """Rows [..., D] of weight [V, D] for indices [...]."""
    device = device_for(weight.device)
    if device is None:
        return reference.forward(indices, weight, first_row, n_total).contiguous()
    return lookup.forward(indices, weight, first_row, n_total, device)


def backward(
    dy: Tensor,
    indices: Tensor,
    n_rows: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
    sparse: bool,
    first_row: int,
) -> tuple[Tensor, Tensor | None]:
    """dweight [n_rows, D] for dy [..., D] and indices [...]; if `sparse`, values and rows as in `lookup.sparse_backward`."""
    if sparse and forward_mode((dy,)):
        raise NotImplementedError("npu_embedding::backward has no forward-mode derivative where sparse is True.")
    device = device_for(dy.device)
    gradient = (dy, indices, n_rows, padding_idx, scale_grad_by_freq, first_row)
    if device is None:
        return reference.sparse_backward(*gradient) if sparse else (reference.backward(*gradient), None)
    return lookup.sparse_backward(*gradient, device) if sparse else (lookup.backward(*gradient, device), None)


def _renormalise_(indices: Tensor, weight: Tensor, max_norm: float, norm_type: float, first_row: int, n_total: int) -> None:
    if device_for(weight.device) is None:
        reference.check(indices, n_total)
    reference.renormalise_(indices, weight, max_norm, norm_type, first_row)


def _fake_forward(indices, weight, padding_idx, scale_grad_by_freq, sparse, first_row, n_total):  # type: ignore[no-untyped-def]
    return torch.empty((*indices.shape, weight.shape[1]), dtype=weight.dtype, device=weight.device)


def _fake_backward(dy, indices, n_rows, padding_idx, scale_grad_by_freq, sparse, first_row):  # type: ignore[no-untyped-def]
    rows = torch.empty(indices.numel(), dtype=torch.int64, device=dy.device) if sparse else None
    return torch.empty((indices.numel() if sparse else n_rows, dy.shape[-1]), dtype=dy.dtype, device=dy.device), rows


def _fake_renormalise_(indices, weight, max_norm, norm_type, first_row, n_total):  # type: ignore[no-untyped-def]
    return None


OPERATORS.define(
    f"forward(Tensor indices, Tensor weight, {_GRADIENT}, SymInt n_total) -> Tensor",
    forward,
    _fake_forward,
    forward_mode=True,
)
OPERATORS.define(
    f"backward(Tensor dy, Tensor indices, SymInt n_rows, {_GRADIENT}) -> (Tensor dweight, Tensor rows)",
    backward,
    _fake_backward,
    forward_mode=True,
)
OPERATORS.define(
    "renormalise_(Tensor indices, Tensor(a!) weight, float max_norm, float norm_type, SymInt first_row, SymInt n_total)"
    " -> ()",
    _renormalise_,
    _fake_renormalise_,
)


def sparse_gradient(rows: Tensor, values: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """The gradient of a table [V, D] with these entries; of a shard without rows it has none."""
    if not shape[0]:
        rows, values = rows[:0], values[:0]
    return torch.sparse_coo_tensor(rows.unsqueeze(0), values, shape, check_invariants=False)


class _Embedding(Function):
    @staticmethod
    def forward(ctx, run, indices, weight, padding_idx, scale_grad_by_freq, sparse, first_row, n_total):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(indices)
        ctx.options = (weight.shape[0], padding_idx, scale_grad_by_freq, sparse, first_row)
        ctx.set_materialize_grads(False)
        options = (padding_idx, scale_grad_by_freq, sparse, first_row, n_total)
        return run(indices, weight, *options)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        dweight = None
        if dy is not None:
            (indices,) = ctx.saved_tensors
            n_rows, _, _, sparse, _ = ctx.options
            dweight, rows = OPERATORS("backward", dy, indices, *ctx.options)
            if sparse:
                shape = (n_rows, dy.shape[-1])
                dweight = sparse_gradient(rows, dweight, shape)
        return None, None, dweight, None, None, None, None, None


def _recorded(run, indices, weight, *options):  # type: ignore[no-untyped-def]
    if needs_gradient((weight,)):
        return apply(_Embedding, run, indices, weight, *options)
    return run(indices, weight, *options)


OPERATORS.autograd("forward", _recorded)
OPERATORS.gradient("backward")
OPERATORS.autograd("renormalise_", lambda run, *arguments: run(*arguments))


def _ngram(ids, history, table, multipliers, sizes, offsets, eos, fill, add, concat, sparse):  # type: ignore[no-untyped-def]
    device = device_for(table.device)
    arguments = (ids, history, table, multipliers, sizes, offsets, eos, fill, add, concat)
    return reference.ngram_forward(*arguments) if device is None else ngram.forward(*arguments, device)


def _fake_ngram(ids, history, table, multipliers, sizes, offsets, eos, fill, add, concat, sparse):  # type: ignore[no-untyped-def]
    heads, width = sizes.shape[0], table.shape[1]
    out = torch.empty((*ids.shape, heads * width if concat else width), dtype=table.dtype, device=table.device)
    return out, torch.empty((heads, *ids.shape), dtype=torch.int32, device=table.device)


OPERATORS.define(
    "ngram(Tensor ids, Tensor? history, Tensor table, Tensor multipliers, Tensor sizes, Tensor offsets, SymInt eos, "
    "SymInt fill, bool add, bool concat, bool sparse) -> (Tensor out, Tensor rows)",
    _ngram,
    _fake_ngram,
)


class _NGram(Function):
    @staticmethod
    def forward(ctx, run, ids, history, table, multipliers, sizes, offsets, eos, fill, add, concat, sparse):  # type: ignore[no-untyped-def]
        arguments = (ids, history, table, multipliers, sizes, offsets, eos, fill, add, concat, sparse)
        out, rows = run(*arguments)
        ctx.save_for_backward(rows)
        ctx.mark_non_differentiable(rows)
        ctx.set_materialize_grads(False)
        ctx.options = (table.shape, concat, sparse)
        return out, rows

    @staticmethod
    def backward(ctx, dy, _):  # type: ignore[no-untyped-def]
        dtable = None
        if dy is not None:
            (rows,) = ctx.saved_tensors
            shape, concat, sparse = ctx.options
            # [H, B * T, D]: a head's part of dy, or all of it for each.
            heads, n = rows.shape[0], rows.shape[1] * rows.shape[2]
            dy = (
                dy.reshape(n, heads, shape[1]).transpose(0, 1)
                if concat
                else dy.reshape(n, shape[1]).expand(heads, n, shape[1])
            )
            dtable, named = OPERATORS("backward", dy, rows.flatten(1), shape[0], NO_ROW, False, sparse, 0)
            if sparse:
                dtable = sparse_gradient(named, dtable, shape)
        return None, None, None, dtable, *[None] * 8


def _ngram_recorded(run, *arguments):  # type: ignore[no-untyped-def]
    if needs_gradient(arguments):
        return apply(_NGram, run, *arguments)
    return run(*arguments)


OPERATORS.autograd("ngram", _ngram_recorded)
