"""RMSNorm's calls."""

from __future__ import annotations

from typing import Any

import torch
from npu_rms_norm import add_rms_norm, add_rms_norm_dynamic_quant, gated_rms_norm, qk_rms_norm, rms_norm

from .making import BF16, FP16, FP32, MANY_ROWS, ROWS, Calls, backward, call, leaf, name, rows


def calls(device: torch.device) -> Calls:
    """Widths on both sides of every step of the tables, casting modes, residuals, rows at strides, in place, heads, int8."""

    def run(shape: tuple[int, ...], dtype: torch.dtype, weight: torch.dtype | None, view: str = "", **options: Any) -> None:
        x = rows(shape, dtype, device, view)
        w = None if weight is None else leaf((shape[-1],), weight, device)
        y = rms_norm(x, w, **options)
        y.backward(rows(shape, dtype, device, view).detach() if view else torch.ones_like(y))

    def add(width: int, dtype: torch.dtype, residual: torch.dtype, **options: Any) -> None:
        x, stream = leaf((ROWS, width), dtype, device), leaf((ROWS, width), residual, device)
        backward(add_rms_norm(x, stream, leaf((width,), dtype, device), **options))

    def gate(width: int, dtype: torch.dtype, **options: Any) -> None:
        x, values, weight = (leaf(shape, dtype, device) for shape in ((ROWS, width), (ROWS, width), (width,)))
        backward(gated_rms_norm(x, values, weight, **options))

    def heads(width: int, dtype: torch.dtype, n_heads: int, **options: Any) -> None:
        x, values = (leaf((ROWS, n_heads, width), dtype, device) for _ in range(2))
        weight, bias = (leaf((n_heads, width), dtype, device) for _ in range(2))
        backward(gated_rms_norm(x, values, weight, bias=bias, **options))

    def quantise(width: int, dtype: torch.dtype) -> None:
        x, stream, weight = (leaf(shape, BF16, device) for shape in ((ROWS, width), (ROWS, width), (width,)))
        add_rms_norm_dynamic_quant(x, stream, weight, dtype=dtype)

    def projection(width: int, dtype: torch.dtype) -> None:
        qkv, *weights = (leaf(shape, dtype, device) for shape in ((ROWS, 8 * width), (width,), (width,)))
        results = qk_rms_norm(qkv, *weights, 4, 2)
        torch.autograd.backward(results, [torch.ones_like(result) for result in results])

    for width in (50, 128):
        yield f"bf16 {width}, q and k", call(projection, width, BF16)
    for width in (7, 128, 2560, 20000):
        yield f"bf16 {width}, 3 heads, bias", call(heads, width, BF16, 3)
        yield f"bf16 {width}, added, int8", call(quantise, width, torch.int8)
        for first in (True, False):
            yield f"bf16 {width}, gated, norm first {first}", call(gate, width, BF16, norm_before_gate=first)
    for width in (1, 7, 100, 512, 1000, 1024, 1500, 2048, 2560, 4096, 5000, 8192, 12000, 16384, 20000, 40000):
        for dtype in (FP32, BF16):
            yield f"{name(dtype)} {width}", call(run, (ROWS, width), dtype, dtype)
        yield f"bf16 {width}, added", call(add, width, BF16, BF16)
    for width in (1000, 4096, 20000):
        yield f"bf16 {width}, {MANY_ROWS} rows", call(run, (MANY_ROWS, width), BF16, FP32)
        yield f"bf16 {width}, no weight", call(run, (ROWS, width), BF16, None)
        yield f"bf16 {width}, added to fp32", call(add, width, BF16, FP32, in_place=True)
        yield f"bf16 {width}, in place", call(run, (ROWS, width), BF16, BF16, in_place=True)
        for mode in ("gemma", "none"):
            yield f"fp16 {width}, {mode}", call(run, (ROWS, width), FP16, FP16, casting_mode=mode, offset=1.0)
        for view in ("sliced", "groups", "transposed", "unaligned"):
            yield f"bf16 {width}, {view}", call(run, (3, 13, width), BF16, BF16, view)
