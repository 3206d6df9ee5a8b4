"""liger-kernel's loss in its four forms for CUDA: Triton kernels, the default, and three that are chosen by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from npu_bench import Case, UnavailableError
from torch import Tensor

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]

NO_OPTIONS = (None, None, -100, 0.0, 0.0, "mean", None, False, None, False, False, False)
"""A loss's arguments after the target, up to the name of the kernels of its cross entropy."""


def triton(case: Case, device: torch.device) -> Loss:
    """What `LigerFusedLinearCrossEntropyLoss` runs."""
    function = _function("liger_kernel.ops", "LigerFusedLinearCrossEntropyFunction", device)
    return lambda x, weight, target: function.apply(x, weight, target)[0]


def cutedsl(case: Case, device: torch.device) -> Loss:
    """The same chunks with a CuTe kernel between the products: what `liger_kernel.functional` chooses on Hopper."""
    function = _function("liger_kernel.ops", "LigerFusedLinearCrossEntropyFunction", device)
    _import("cutlass.cute")
    return lambda x, weight, target: function.apply(x, weight, target, *NO_OPTIONS, "nvidia-cutedsl", None)[0]


def sm90(case: Case, device: torch.device) -> Loss:
    """Products of its own for Hopper, with all logits in memory; tokens and vocabulary in whole tiles of 128 and 256."""
    module = "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90"
    function = _function(module, "LigerFusedLinearCrossEntropySM90Function", device)
    return lambda x, weight, target: function.apply(x, weight, target)


def cutile(case: Case, device: torch.device) -> Loss:
    """cuTile's kernels for Hopper, with all logits in memory; needs the package cuda-tile and its compiler."""
    module = "liger_kernel.ops.cutile.ops.fused_linear_cross_entropy"
    function = _function(module, "LigerFusedLinearCrossEntropyFunction", device)
    return lambda x, weight, target: function.apply(x, weight, target)[0]


def _function(module: str, name: str, device: torch.device) -> Any:
    if device.type != "cuda" and module != "liger_kernel.ops":
        raise UnavailableError(f"{module} is for CUDA")
    if device.type == "cpu":
        raise UnavailableError("liger-kernel has no kernels for a CPU")
    return getattr(_import(module), name)


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnavailableError(str(error)) from None
