"""quack-kernels' loss, for Hopper and later. Its module takes chunks where it can, and else all logits at once.

Version 0.6.5 was run with nvidia-cutlass-dsl 4.7.1 and 4.8.1. Its import raises a TypeError where no folder of
its path is named site-packages or dist-packages, as with `pip install --target FOLDER`: name that folder so.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from npu_bench import Case, UnavailableError
from torch import Tensor

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
UNIT = 8


def chunks_of(tokens: int) -> Callable[[Case, torch.device], Loss]:
    """The provider with chunks of so many tokens: 4096 by default, half of which take half the memory.

    Chunks as long as a token is wide fail in version 0.6.5.
    """

    def provider(case: Case, device: torch.device) -> Loss:
        module = _module(device)
        if any(case[size] % UNIT for size in ("tokens", "width", "vocabulary")):
            raise UnavailableError(f"chunks need tokens, width and vocabulary in multiples of {UNIT}")
        return lambda x, weight, target: module.chunked_linear_cross_entropy(x, weight, target, chunk_size=tokens)

    return provider


def whole(case: Case, device: torch.device) -> Loss:
    """All logits in memory, and their gradient over them: a linear layer, and a cross entropy in one kernel."""
    module = _module(device)
    return lambda x, weight, target: module.linear_cross_entropy_func(x, weight, None, target, inplace_backward=True)


def _module(device: torch.device) -> Any:
    if device.type != "cuda":
        raise UnavailableError("quack-kernels' kernels are CUDA's")
    try:
        return importlib.import_module("quack.linear_cross_entropy")
    except ImportError as error:
        raise UnavailableError(str(error)) from None
