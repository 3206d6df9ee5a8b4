"""What all calls are made of: inputs, and their backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Call = tuple[str, Callable[[], None]]
Calls = Iterator[Call]

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ROWS, MANY_ROWS = 37, 1500  # fewer, and more tiles than a persistent grid has programs


def call(function: Callable[..., None], *arguments: Any, **options: Any) -> Callable[[], None]:
    return lambda: function(*arguments, **options)


def leaf(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device).to(dtype).requires_grad_()


def rows(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, view: str) -> Tensor:
    """Rows as a view has them: part of wider rows, groups apart, groups side by side, or an address of 2 bytes more."""
    outer, inner, width = shape if view else (1, *shape)
    storage = torch.randn(2 * outer * inner * width + 1, device=device).to(dtype)
    strides = {
        "": (inner * width, width, 1),
        "sliced": (2 * inner * width, 2 * width, 1),
        "groups": (2 * inner * width, width, 1),
        "transposed": (width, outer * width, 1),
        "unaligned": (inner * width, width, 1),
    }
    rows = storage.as_strided((outer, inner, width), strides[view], int(view == "unaligned"))
    return rows.view(shape).requires_grad_()


def backward(outputs: Tensor | tuple[Tensor | None, ...]) -> None:
    every = [outputs] if isinstance(outputs, Tensor) else [output for output in outputs if output is not None]
    given = [output for output in every if output.requires_grad]
    torch.autograd.backward(given, [torch.ones_like(output) for output in given])


def name(dtype: torch.dtype) -> str:
    return {FP32: "fp32", BF16: "bf16", FP16: "fp16"}[dtype]
