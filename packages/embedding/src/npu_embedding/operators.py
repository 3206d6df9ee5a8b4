"""The operators registered with PyTorch, in its namespace `npu_embedding`: schema, implementation, fake function.

`embedding`, its gradients `embedding_backward` and `embedding_sparse_backward`: kernels on accelerators, reference.py on a
CPU; and `renormalise_`: PyTorch everywhere. A table is rows `first` to `first + V - 1` of `n_total`; `padding_idx` is -1 for
none. Gradients are in autograd.py, which alone reads `sparse`.
"""

from __future__ import annotations

import torch
from npu_tiling import device_for
from npu_tiling.pytorch.autograd import OperatorLibrary
from torch import Tensor

from . import launch, reference

OPERATORS = OperatorLibrary("npu_embedding")


def _embedding(
    indices: Tensor, weight: Tensor, padding_idx: int, scale_grad_by_freq: bool, sparse: bool, first: int, n_total: int
) -> Tensor:
    device = device_for(weight.device)
    if device is None:
        return reference.forward(indices, weight, first, n_total).contiguous()
    return launch.forward(indices, weight, first, n_total, device)


def _embedding_backward(
    dy: Tensor, indices: Tensor, n_rows: int, padding_idx: int, scale_grad_by_freq: bool, first: int
) -> Tensor:
    device = device_for(dy.device)
    if device is None:
        return reference.backward(dy, indices, n_rows, padding_idx, scale_grad_by_freq, first)
    return launch.backward(dy, indices, n_rows, padding_idx, scale_grad_by_freq, first, device)


def _embedding_sparse_backward(
    dy: Tensor, indices: Tensor, n_rows: int, padding_idx: int, scale_grad_by_freq: bool, first: int
) -> tuple[Tensor, Tensor]:
    device = device_for(dy.device)
    flat = indices.reshape(-1)
    n = flat.numel()
    if device is None:
        slot, order, rows = reference.slots(flat, n_rows, padding_idx, first)
        slot_of = torch.empty_like(slot).scatter_(0, order, slot)
        return reference.backward(dy, slot_of, n, -1, scale_grad_by_freq, 0), rows
    slot, order, rows = launch.sparse_slots(flat, n_rows, padding_idx, first, device)
    return launch.sum_slots(dy, slot, order, scale_grad_by_freq, device), rows


def _renormalise_(indices: Tensor, weight: Tensor, max_norm: float, norm_type: float, first: int, n_total: int) -> None:
    if device_for(weight.device) is None:
        reference.check(indices, n_total)
    reference.renormalise_(indices, weight, max_norm, norm_type, first)


def _fake_embedding(indices, weight, padding_idx, scale_grad_by_freq, sparse, first, n_total):  # type: ignore[no-untyped-def]
    return torch.empty((*indices.shape, weight.shape[1]), dtype=weight.dtype, device=weight.device)


def _fake_backward(dy, indices, n_rows, padding_idx, scale_grad_by_freq, first):  # type: ignore[no-untyped-def]
    return torch.empty((n_rows, dy.shape[-1]), dtype=dy.dtype, device=dy.device)


def _fake_sparse_backward(dy, indices, n_rows, padding_idx, scale_grad_by_freq, first):  # type: ignore[no-untyped-def]
    values = torch.empty((indices.numel(), dy.shape[-1]), dtype=dy.dtype, device=dy.device)
    return values, torch.empty(indices.numel(), dtype=torch.int64, device=dy.device)


def _fake_renormalise_(indices, weight, max_norm, norm_type, first, n_total):  # type: ignore[no-untyped-def]
    return None


OPERATORS.define(
    "embedding(Tensor indices, Tensor weight, SymInt padding_idx, bool scale_grad_by_freq, bool sparse, SymInt first,"
    " SymInt n_total) -> Tensor",
    _embedding,
    _fake_embedding,
    forward_mode=True,
)
_BACKWARD = "Tensor dy, Tensor indices, SymInt n_rows, SymInt padding_idx, bool scale_grad_by_freq, SymInt first"
OPERATORS.define(f"embedding_backward({_BACKWARD}) -> Tensor", _embedding_backward, _fake_backward, forward_mode=True)
OPERATORS.define(
    f"embedding_sparse_backward({_BACKWARD}) -> (Tensor values, Tensor rows)",
    _embedding_sparse_backward,
    _fake_sparse_backward,
)
OPERATORS.define(
    "renormalise_(Tensor indices, Tensor(a!) weight, float max_norm, float norm_type, SymInt first, SymInt n_total) -> ()",
    _renormalise_,
    _fake_renormalise_,
)
