"""Calls whose launches are every kind of tile that this package's tiling can choose: what `npu-offline check` compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from npu_rms_norm import (
    add_rms_norm,
    add_rms_norm_dynamic_quant,
    gated_rms_norm,
    qk_rms_norm,
    rms_norm,
    rms_norm_dynamic_quant,
)

ROWS = 4096  # the tile does not depend on it
WIDE, FEW_ROWS = 16384, 512  # enough for every core, in an eighth of the time
WIDTHS = {
    torch.bfloat16: (1, 100, 123, 128, 512, 1000, 2048, 3584, 4096, 5120, 7168, 8192, 16384, 65536),
    torch.float16: (512, 8192),
    torch.float32: (1, 123, 512, 2048, 4096, 6144, 8192, 16384),
}
# A call for each kind of tile: what lint at each commit and quick reports look at.
SAMPLE = (
    "bfloat16 512",
    "bfloat16 8192",
    "float32 123",
    "bfloat16 65536",
    "bfloat16 4096, residual",
    "bfloat16, 32 heads of 128",
)
# Calls that launch every kernel with every value of its flags: executed at each commit.
WAYS = (
    "float32 16384, gated first",
    "bfloat16 128, no weight",
    "bfloat16 16384, no weight",
    "float32 2048, gated first",
    "bfloat16 2048, int8",
    "bfloat16 16384, int8",
    "bfloat16 128, 32 weights, gated first",
    "bfloat16 512",
    "bfloat16 4096, residual",
    "bfloat16, q and k, 4 and 2 heads of 128",
)
# Calls among these that launch every kernel: executed with every compiler, and for an A3.
KERNELS = (
    "float32 16384, gated first",
    "bfloat16 128, no weight",
)


def calls() -> Iterator[tuple[str, Callable[[], None]]]:
    """A label and a function that runs a forward and a backward on CPU tensors."""
    bf16, fp32 = torch.bfloat16, torch.float32
    for dtype, widths in WIDTHS.items():
        for width in widths:
            yield f"{dtype} {width}".removeprefix("torch."), _call(width, dtype, dtype)
    for width in (128, 4096, 16384):
        yield f"bfloat16 {width}, fp32 weight", _call(width, bf16, fp32)
        yield f"bfloat16 {width}, no weight", _call(width, bf16, None)
        yield f"bfloat16 {width}, residual", _call(width, bf16, bf16, residual=bf16)
        yield f"bfloat16 {width}, fp32 residual", _call(width, bf16, fp32, residual=fp32)
        yield f"bfloat16 {width} gemma", _call(width, bf16, bf16, mode="gemma")
        yield f"bfloat16 {width} none", _call(width, bf16, bf16, mode="none")
        yield f"float32 {width}, residual", _call(width, fp32, fp32, residual=fp32)
    for width in (128, 2048, 16384):
        for first in (True, False):
            order = "gated" if first else "gated first"
            yield f"bfloat16 {width}, {order}", _gated(width, bf16, norm_before_gate=first)
            yield f"float32 {width}, {order}", _gated(width, fp32, norm_before_gate=first)
        yield f"bfloat16 {width}, in fp32 too", _two_outputs(width)
        yield f"bfloat16 {width}, int8", _int8(width, residual=False)
        yield f"bfloat16 {width}, residual, int8", _int8(width, residual=True)
        yield f"bfloat16 {width}, bias", _call(width, bf16, bf16, bias=True)
    for first in (True, False):  # the widest rows of a model that a gated backward reads once
        yield f"bfloat16 4096, {'gated' if first else 'gated first'}", _gated(4096, bf16, norm_before_gate=first)
    yield "bfloat16 8192, residual", _call(8192, bf16, bf16, residual=bf16)
    yield "bfloat16 8192, fp32 residual", _call(8192, bf16, fp32, residual=fp32)
    yield "bfloat16 128, gated none", _gated(128, bf16, norm_before_gate=True, mode="none")
    for first in (True, False):
        yield (
            f"bfloat16 128, 32 weights, {'gated' if first else 'gated first'}",
            _gated(128, bf16, norm_before_gate=first, heads=32),
        )
    for heads in (4, 32):
        yield f"bfloat16, {heads} heads of 128", _call(128, bf16, bf16, heads=heads)
        yield f"bfloat16, q and k, {heads} and 2 heads of 128", _projection(128, heads, 2)


def sized_calls() -> Iterator[tuple[str, Callable[[], None]]]:
    """The same at sizes at which time counts: what `npu-offline tune` searches tiles for."""
    for width in (512, 1024, 2048, 4096, 8192):
        for rows in (2048, 8192):
            yield f"bfloat16 {rows} x {width}", _call(width, torch.bfloat16, torch.bfloat16, rows=rows)
    for width in (64, 128, 256):
        yield f"bfloat16 262144 x {width}", _call(width, torch.bfloat16, torch.bfloat16, rows=262144)
        yield f"bfloat16 262144 x {width}, gated", _gated(width, torch.bfloat16, norm_before_gate=True, rows=262144)


def _rows(width: int) -> int:
    return ROWS if width < WIDE else FEW_ROWS


def _call(
    width: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    *,
    mode: str = "llama",
    residual: torch.dtype | None = None,
    heads: int = 0,
    rows: int | None = None,
    bias: bool = False,
) -> Callable[[], None]:
    def call() -> None:
        n = rows or _rows(width)
        x = torch.empty(n, width, dtype=dtype)
        if heads:
            x = torch.empty(n // heads, 3 * heads * width, dtype=dtype)[:, : heads * width].unflatten(1, (heads, width))
        x.requires_grad_()
        weight = None if weight_dtype is None else torch.empty(width, dtype=weight_dtype, requires_grad=True)
        if residual is None:
            added = torch.empty(width, dtype=dtype, requires_grad=True) if bias else None
            outputs: tuple[torch.Tensor, ...] = (rms_norm(x, weight, bias=added, casting_mode=mode),)
        else:
            outputs = add_rms_norm(x, torch.empty(x.shape, dtype=residual), weight, casting_mode=mode)
        torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])

    return call


def _gated(
    width: int, dtype: torch.dtype, *, norm_before_gate: bool, mode: str = "llama", rows: int | None = None, heads: int = 0
) -> Callable[[], None]:
    """`heads`: as many weights, one for each."""

    def call() -> None:
        shape = (heads, width) if heads else (width,)
        x, gate = (
            torch.empty((rows or _rows(width)) // max(1, heads), *shape, dtype=dtype, requires_grad=True) for _ in range(2)
        )
        weight = torch.empty(shape, dtype=dtype, requires_grad=True)
        y = gated_rms_norm(x, gate, weight, casting_mode=mode, norm_before_gate=norm_before_gate)
        torch.autograd.backward(y, torch.empty_like(y))

    return call


def _projection(width: int, n_heads: int, n_kv_heads: int) -> Callable[[], None]:
    def call() -> None:
        heads = n_heads + 2 * n_kv_heads
        qkv = torch.empty(ROWS // n_heads, heads * width, dtype=torch.bfloat16, requires_grad=True)
        weights = (torch.empty(width, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        results = tuple(qk_rms_norm(qkv, *weights, n_heads, n_kv_heads))
        torch.autograd.backward(results, [torch.empty_like(result) for result in results])

    return call


def _int8(width: int, *, residual: bool) -> Callable[[], None]:
    def call() -> None:
        x, weight = torch.empty(_rows(width), width, dtype=torch.bfloat16), torch.empty(width, dtype=torch.bfloat16)
        if residual:
            add_rms_norm_dynamic_quant(x, torch.empty_like(x), weight)
        else:
            rms_norm_dynamic_quant(x, weight)

    return call


def _two_outputs(width: int) -> Callable[[], None]:
    def call() -> None:
        x, residual = (torch.empty(_rows(width), width, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        weight = torch.empty(width, dtype=torch.bfloat16, requires_grad=True)
        outputs = add_rms_norm(x, residual, weight, dtype=torch.float32, return_fp32=True)
        torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])

    return call
