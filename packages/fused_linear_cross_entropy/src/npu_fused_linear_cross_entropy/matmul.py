"""Matrix products by the framework into memory that is there already, with an fp32 result wherever it can have one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_COPY_BYTES = 2**24  # operands are copied in pieces of at most this
_HALF = 2  # bytes of bf16 and fp16
_UNIT = 8  # of their elements: 16 bytes
_FEWEST = 512  # elements of a dimension from which taking it apart is worth more launches


def writes_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of matrices of `dtype` can have an fp32 result without rounding in between.

    On a CPU they can, by widening the operands piece by piece. On an accelerator its own matrix product must be able to.
    """
    return dtype.itemsize >= torch.float32.itemsize or device.type == "cpu" or _native("mm", device)


def product(a: Tensor, b: Tensor, out: Tensor, alpha: float = 1.0) -> None:
    """out = alpha a @ b, rounded once; out has the operands' dtype or is fp32."""
    for left, right, target, is_first in _parts(a, b, out):
        if is_first and alpha == 1.0:
            _product(left, right, target)
        else:
            _add_product(left, right, target, 0.0 if is_first else 1.0, alpha)


def add_product(a: Tensor, b: Tensor, out: Tensor, alpha: float = 1.0) -> None:
    """out += alpha a @ b, in place; out has the operands' dtype, in which each sum is rounded, or is fp32."""
    for left, right, target, _ in _parts(a, b, out):
        _add_product(left, right, target, 1.0, alpha)


def _product(a: Tensor, b: Tensor, out: Tensor) -> None:
    if out.dtype == a.dtype:
        for rows in _pieces(a):
            torch.mm(_dense(a[rows]), b, out=out[rows])
    elif _native("mm", a.device):
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        _widened(a, b, out, 0.0, 1.0)


def _add_product(a: Tensor, b: Tensor, out: Tensor, beta: float, alpha: float) -> None:
    """out = beta out + alpha a @ b; what out held does not count where beta is 0."""
    if out.dtype == a.dtype:
        for rows in _pieces(a):
            torch.addmm(out[rows], _dense(a[rows]), b, beta=beta, alpha=alpha, out=out[rows])
    elif _native("addmm", a.device):
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=beta, alpha=alpha, out=out)
    else:
        _widened(a, b, out, beta, alpha)


def _parts(a: Tensor, b: Tensor, out: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, bool]]:
    """Products that one is made of, and whether each is the first into its part of the result.

    cuBLAS multiplies bf16 and fp16 up to five times slower where a dimension along which an operand or the result is
    contiguous is not whole 16 bytes, however far apart rows are (CUDA 13.0, H200: 1.66 ms instead of .28 for
    2048 x 768 x 50257). So what is more than that comes apart. Of a sum the few odd terms come first: what is rounded in
    between is small then.
    """
    if not _is_taken_apart(a):
        yield a, b, out, True
        return
    m, k, n = a.shape[0], a.shape[1], b.shape[1]
    rows = _whole(m, _is_along(a, 0) or _is_along(out, 0))
    terms = _whole(k, _is_along(a, 1) or _is_along(b, 0))
    columns = _whole(n, _is_along(b, 1) or _is_along(out, 1))
    for i in rows:
        for j in columns:
            for number, p in enumerate(reversed(terms)):
                yield a[i, p], b[p, j], out[i, j], number == 0


def _is_taken_apart(a: Tensor) -> bool:
    return a.device.type == "cuda" and a.itemsize == _HALF


def _is_along(matrix: Tensor, dimension: int) -> bool:
    return matrix.stride(dimension) == 1


def _whole(length: int, is_contiguous: bool) -> tuple[slice, ...]:
    """A dimension, or its whole units and the rest."""
    end = length // _UNIT * _UNIT
    if not is_contiguous or end == length or end < _FEWEST:
        return (slice(0, length),)
    return slice(0, end), slice(end, length)


def _pieces(a: Tensor) -> Iterator[slice]:
    """The rows of a left operand that one product takes: all, unless they are to be copied."""
    step = max(1, _COPY_BYTES // max(1, a.shape[1] * a.itemsize)) if _is_misread(a) else max(1, a.shape[0])
    return (slice(first, first + step) for first in range(0, a.shape[0], step))


def _dense(a: Tensor) -> Tensor:
    return a.contiguous() if _is_misread(a) else a


def _is_misread(a: Tensor) -> bool:
    """Whether PyTorch's product may take in what lies between the rows of a left operand.

    On a CPU with matrix tiles (AMX) oneDNN's bf16 and fp16 products, as of torch 2.13, read whole tiles and
    multiply what is past the end of a row by zero: a NaN there, in memory that nobody has written, becomes one in the
    result. In torch 2.7 so does what lies between the elements of a single row.
    """
    if a.device.type != "cpu" or a.itemsize != _HALF:
        return False
    return a.stride(0) > a.shape[1] if a.stride(1) == 1 else a.shape[0] == 1


def _native(operator: str, device: torch.device) -> bool:
    key = {"cuda": "CUDA", "npu": "PrivateUse1"}.get(device.type, "CPU")
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}.dtype_out", key)
    except RuntimeError:  # a PyTorch without the operator
        return False


def _widened(a: Tensor, b: Tensor, out: Tensor, beta: float, alpha: float) -> None:
    """The larger operand is cast to out's dtype in pieces, and the other one as a whole."""
    if a.numel() > b.numel():
        a, b, out = b.t(), a.t(), out.t()
    a = a.to(out.dtype)
    step = max(1, _COPY_BYTES // max(1, b.shape[0] * out.dtype.itemsize))
    for first in range(0, b.shape[1], step):
        piece = b[:, first : first + step].to(out.dtype)
        target = out[:, first : first + step]
        torch.addmm(target, a, piece, beta=beta, alpha=alpha, out=target)
