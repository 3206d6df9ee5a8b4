"""PyTorch's matrix products into given memory, with an fp32 result where PyTorch can write one."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

import torch
from npu_tiling import device_for
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
    """out = alpha a @ b; out has the operands' dtype or is fp32. Rounded once, or twice where `_parts` takes terms apart."""
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
        if not _is_misread(a):
            torch.mm(a, b, out=out)
            return
        for rows in _pieces(a):
            torch.mm(a[rows].contiguous(), b, out=out[rows])
    elif _native("mm", a.device):
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        _widened(a, b, out, 0.0, 1.0)


def _add_product(a: Tensor, b: Tensor, out: Tensor, beta: float, alpha: float) -> None:
    """out = beta out + alpha a @ b; out may hold anything where beta is 0."""
    if out.dtype == a.dtype:
        if not _is_misread(a):
            torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out)
            return
        for rows in _pieces(a):
            torch.addmm(out[rows], a[rows].contiguous(), b, beta=beta, alpha=alpha, out=out[rows])
    elif _native("addmm", a.device):
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=beta, alpha=alpha, out=out)
    else:
        _widened(a, b, out, beta, alpha)


def _parts(a: Tensor, b: Tensor, out: Tensor) -> Iterable[tuple[Tensor, Tensor, Tensor, bool]]:
    """Products that one is made of, and whether each is the first into its part of the result.

    cuBLAS multiplies bf16 and fp16 up to five times slower where a dimension along which an operand or the result is
    contiguous is not whole 16 bytes, however far apart rows are (CUDA 13.0, H200: 1.66 ms instead of .28 for
    2048 x 768 x 50257). So the unaligned tail is split off. Where terms of a sum are split, the tail comes first: the sum
    that is rounded in between is small then.
    """
    if not _is_taken_apart(a):
        return ((a, b, out, True),)
    (m, k), n = a.shape, b.shape[1]
    (a_rows, a_terms), (b_terms, b_columns), (out_rows, out_columns) = a.stride(), b.stride(), out.stride()
    ends = (
        _end(m, a_rows == 1 or out_rows == 1),
        _end(k, a_terms == 1 or b_terms == 1),
        _end(n, b_columns == 1 or out_columns == 1),
    )
    if ends == (m, k, n):
        return ((a, b, out, True),)
    return _cut(a, b, out, ends)


def _cut(a: Tensor, b: Tensor, out: Tensor, ends: tuple[int, int, int]) -> Iterator[tuple[Tensor, Tensor, Tensor, bool]]:
    rows, terms, columns = (_slices(length, end) for length, end in zip((*a.shape, b.shape[1]), ends, strict=True))
    for i in rows:
        for j in columns:
            for number, p in enumerate(reversed(terms)):
                yield a[i, p], b[p, j], out[i, j], number == 0


def _slices(length: int, end: int) -> tuple[slice, ...]:
    return (slice(0, length),) if end == length else (slice(0, end), slice(end, length))


def _is_taken_apart(a: Tensor) -> bool:
    return a.itemsize == _HALF and (a.is_cuda or (a.is_meta and getattr(device_for(a.device), "kind", "") == "cuda"))


def _end(length: int, is_contiguous: bool) -> int:
    """Where the whole units of a dimension end, if a tail is to be split off there; else the length."""
    end = length // _UNIT * _UNIT
    return end if is_contiguous and end >= _FEWEST else length


def _pieces(a: Tensor) -> Iterator[slice]:
    """The rows of a left operand that one product takes where they are to be copied."""
    step = max(1, _COPY_BYTES // max(1, a.shape[1] * a.itemsize))
    return (slice(first, first + step) for first in range(0, a.shape[0], step))


def _is_misread(a: Tensor) -> bool:
    """Whether PyTorch's product may read memory between the rows of a left operand.

    On a CPU with matrix tiles (AMX) oneDNN's bf16 and fp16 products, as of torch 2.13, read whole tiles and
    multiply elements past the end of a row by zero: a NaN there, in memory that nobody has written, becomes one in the
    result. In torch 2.7 so does a NaN between the elements of a single row.
    """
    if not a.is_cpu or a.itemsize != _HALF:
        return False
    return a.stride(0) > a.shape[1] if a.stride(1) == 1 else a.shape[0] == 1


def _native(operator: str, device: torch.device) -> bool:
    """Whether PyTorch has a product into another dtype for a device; in a dry run, for any."""
    keys = {"cuda": "CUDA", "npu": "PrivateUse1", "meta": "Meta"}
    return _is_registered(f"aten::{operator}.dtype_out", keys.get(device.type, "CPU"))


@functools.cache
def _is_registered(operator: str, key: str) -> bool:
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)
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
