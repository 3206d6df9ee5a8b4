"""Matrix products by the framework into memory that is there already, with an fp32 result wherever it can have one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_COPY_BYTES = 2**24  # operands are copied in pieces of at most this


def writes_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of matrices of `dtype` can have an fp32 result without rounding in between.

    On a CPU they can, by widening the operands piece by piece. On an accelerator its own matrix product must be able to.
    """
    return dtype.itemsize >= torch.float32.itemsize or device.type == "cpu" or _native("mm", device)


def product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b; out has the operands' dtype or is fp32."""
    if out.dtype == a.dtype:
        for rows in _pieces(a):
            torch.mm(_dense(a[rows]), b, out=out[rows])
    elif _native("mm", a.device):
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        _widened(a, b, out, add=False)


def add_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out += a @ b, in place; out has the operands' dtype, in which each sum is rounded, or is fp32."""
    if out.dtype == a.dtype:
        for rows in _pieces(a):
            torch.addmm(out[rows], _dense(a[rows]), b, out=out[rows])
    elif _native("addmm", a.device):
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        _widened(a, b, out, add=True)


def _pieces(a: Tensor) -> Iterator[slice]:
    """The rows of a left operand that one product takes: all, unless they are to be copied."""
    step = max(1, _COPY_BYTES // max(1, a.shape[1] * a.itemsize)) if _is_misread(a) else max(1, a.shape[0])
    return (slice(first, first + step) for first in range(0, a.shape[0], step))


def _dense(a: Tensor) -> Tensor:
    return a.contiguous() if _is_misread(a) else a


def _is_misread(a: Tensor) -> bool:
    """Whether PyTorch's product may take in what lies between the rows of a left operand.

    On a CPU with matrix tiles (AMX) oneDNN's bf16 product, as of torch 2.13, reads whole tiles and multiplies what is past
    the end of a row by zero: a NaN there, in memory that nobody has written, becomes one in the result.
    """
    return a.device.type == "cpu" and a.dtype == torch.bfloat16 and a.stride(1) == 1 and a.stride(0) > a.shape[1]


def _native(operator: str, device: torch.device) -> bool:
    key = {"cuda": "CUDA", "npu": "PrivateUse1"}.get(device.type, "CPU")
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}.dtype_out", key)
    except RuntimeError:  # a PyTorch without the operator
        return False


def _widened(a: Tensor, b: Tensor, out: Tensor, *, add: bool) -> None:
    """The larger operand is cast to out's dtype in pieces, and the other one as a whole."""
    if a.numel() > b.numel():
        a, b, out = b.t(), a.t(), out.t()
    a = a.to(out.dtype)
    step = max(1, _COPY_BYTES // max(1, b.shape[0] * out.dtype.itemsize))
    for first in range(0, b.shape[1], step):
        piece = b[:, first : first + step].to(out.dtype)
        target = out[:, first : first + step]
        if add:
            target += torch.mm(a, piece)
        else:
            torch.mm(a, piece, out=target)
