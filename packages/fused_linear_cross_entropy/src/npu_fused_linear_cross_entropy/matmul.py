"""PyTorch's matrix products into given memory, as steps of a plan, with an fp32 result where PyTorch can write one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from npu_tiling.dispatch import is_registered
from npu_tiling.plans import Plan
from torch import Tensor

PLANS_FOR_CALLERS = True  # so that `explain` names the line that calls a function of this module (npu_tiling/plans.py)

_COPY_BYTES = 2**24  # operands are copied in pieces of at most this
_HALF = 2  # bytes of bf16 and fp16
_UNIT = 8  # of their elements: 16 bytes
_FEWEST = 512  # elements of a dimension from which taking it apart is worth more launches


def writes_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of matrices of `dtype` can have an fp32 result without rounding in between.

    On a CPU they can, by widening the operands piece by piece. On an accelerator its own matrix product must be able to.
    """
    return dtype.itemsize >= torch.float32.itemsize or device.type == "cpu" or _native("mm", device)


def multiply(p: Plan, a: Any, b: Any, out: Any, *, adds: bool = False, alpha: float = 1.0) -> None:
    """Adds the steps of out = alpha a @ b, or of out += alpha a @ b, to a plan.

    out has the operands' dtype, in which each sum is rounded, or is fp32. A product is rounded once, or twice where `_parts`
    takes terms apart.
    """
    for rows, terms, columns, is_first in _parts(a, b, out, _is_taken_apart(p, a)):
        left, right, target = _cut(p, a, rows, terms), _cut(p, b, terms, columns), _cut(p, out, rows, columns)
        beta = 1.0 if adds or not is_first else 0.0
        is_wide, adds_or_scales = out.dtype != a.dtype, bool(beta) or alpha != 1.0
        if is_wide and not _native("addmm" if adds_or_scales else "mm", p.device):
            p.torch(_widened, left, right, target, beta, alpha, writes=[target])
        elif not is_wide and _is_misread(p, left):
            p.torch(_multiply_pieces, left, right, target, beta, alpha, writes=[target])
        elif adds_or_scales:
            p.torch(_addmm_wide if is_wide else _addmm, left, right, target, beta, alpha, writes=[target])
        else:
            p.torch(_mm_wide if is_wide else _mm, left, right, target, writes=[target])


def _mm(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.mm(a, b, out=out)


def _mm_wide(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.mm(a, b, out_dtype=out.dtype, out=out)


def _addmm(a: Tensor, b: Tensor, out: Tensor, beta: float, alpha: float) -> None:
    """out = beta out + alpha a @ b; out may hold anything where beta is 0."""
    torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out)


def _addmm_wide(a: Tensor, b: Tensor, out: Tensor, beta: float, alpha: float) -> None:
    torch.addmm(out, a, b, out_dtype=out.dtype, beta=beta, alpha=alpha, out=out)


def _multiply_pieces(a: Tensor, b: Tensor, out: Tensor, beta: float, alpha: float) -> None:
    """As `_addmm`, of copies of some rows at a time."""
    step = max(1, _COPY_BYTES // max(1, a.shape[1] * a.itemsize))
    for first in range(0, a.shape[0], step):
        rows = slice(first, first + step)
        if beta or alpha != 1.0:
            _addmm(a[rows].contiguous(), b, out[rows], beta, alpha)
        else:
            _mm(a[rows].contiguous(), b, out[rows])


def _parts(a: Any, b: Any, out: Any, is_taken_apart: bool) -> Iterator[tuple[slice, slice, slice, bool]]:
    """Products that one is made of: rows, terms and columns, and whether each is the first into its part of the result.

    cuBLAS multiplies bf16 and fp16 up to five times slower where a dimension along which an operand or the result is
    contiguous is not whole 16 bytes, however far apart rows are (CUDA 13.0, H200: 1.66 ms instead of .28 for
    2048 x 768 x 50257). So the unaligned tail is split off. Where terms of a sum are split, the tail comes first: the sum
    that is rounded in between is small then.
    """
    (m, k), n = a.shape, b.shape[1]
    ends = (m, k, n)
    if is_taken_apart:
        (a_rows, a_terms), (b_terms, b_columns), (out_rows, out_columns) = a.strides, b.strides, out.strides
        ends = (
            _end(m, a_rows == 1 or out_rows == 1),
            _end(k, a_terms == 1 or b_terms == 1),
            _end(n, b_columns == 1 or out_columns == 1),
        )
    rows, terms, columns = (_slices(length, end) for length, end in zip((m, k, n), ends, strict=True))
    for i in rows:
        for j in columns:
            for number, of in enumerate(reversed(terms)):
                yield i, of, j, number == 0


def _is_taken_apart(p: Plan, a: Any) -> bool:
    return a.dtype.itemsize == _HALF and p.device.type != "cpu" and p.chip is not None and p.chip.kind == "cuda"


def _slices(length: int, end: int) -> tuple[slice, ...]:
    return (slice(0, length),) if end == length else (slice(0, end), slice(end, length))


def _cut(p: Plan, matrix: Any, rows: slice, columns: slice) -> Any:
    """A part of a matrix; all of it is no view."""
    shape = (rows.stop - rows.start, columns.stop - columns.start)
    if shape == matrix.shape:
        return matrix
    down, across = matrix.strides
    return p.view(matrix, shape, (down, across), rows.start * down + columns.start * across)


def _end(length: int, is_contiguous: bool) -> int:
    """Where the whole units of a dimension end, if a tail is to be split off there; else the length."""
    end = length // _UNIT * _UNIT
    return end if is_contiguous and end >= _FEWEST else length


def _is_misread(p: Plan, a: Any) -> bool:
    """Whether PyTorch's product may read memory between the rows of a left operand.

    On a CPU with matrix tiles (AMX) oneDNN's bf16 and fp16 products, as of torch 2.13, read whole tiles and multiply
    elements past the end of a row by zero: a NaN there, in memory that nobody has written, becomes one in the result. In
    torch 2.7 so does a NaN between the elements of a single row.
    """
    if p.device.type != "cpu" or a.dtype.itemsize != _HALF:
        return False
    return a.strides[0] > a.shape[1] if a.strides[1] == 1 else a.shape[0] == 1


def _native(operator: str, device: torch.device) -> bool:
    """Whether PyTorch has a product into another dtype for a device; in a dry run, for any."""
    keys = {"cuda": "CUDA", "npu": "PrivateUse1", "meta": "Meta"}
    return is_registered(f"aten::{operator}.dtype_out", keys.get(device.type, "CPU"))


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
