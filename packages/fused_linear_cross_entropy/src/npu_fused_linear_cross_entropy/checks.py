"""Checks of the public functions' tensors, and autocast's casts of them."""

from __future__ import annotations

import torch
from npu_tiling.pytorch import arguments
from npu_tiling.pytorch.sharding import is_distributed
from npu_tiling.pytorch.tensors import is_autocast, statistics_dtype
from torch import Tensor

from . import parallel
from .calls import LossInputs
from .options import EachOptions, Options


def check_weight_grad(weight_grad: Tensor | None, weight: Tensor, accum_dtype: torch.dtype | None) -> torch.dtype | None:
    """The dtype in which the weight's gradient is summed: weight_grad's, if it is given."""
    arguments.tensor("weight_grad", weight_grad, or_none=True)
    if weight_grad is None:
        return accum_dtype
    arguments.tensor("weight", weight)
    arguments.shape("weight_grad", weight_grad, weight.shape)
    arguments.device("weight_grad", weight_grad, weight, "weight's")
    if weight_grad.dtype != weight.dtype:
        arguments.dtype("weight_grad", weight_grad, *dict.fromkeys((weight.dtype, statistics_dtype(weight.dtype))))
    if accum_dtype not in (None, weight_grad.dtype):
        raise TypeError(f"accum_dtype is {accum_dtype} and must be weight_grad's, {weight_grad.dtype}, or None.")
    if weight_grad.requires_grad:
        raise ValueError("weight_grad requires a gradient and must not.")
    if is_distributed((weight_grad, weight)):
        raise ValueError("weight_grad must be left out where there are DTensors.")
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise NotImplementedError("weight_grad must be left out under torch.func, whose functions change no argument.")
    return weight_grad.dtype


def autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands of a linear layer as autocast casts them; all as they are where x is fp64, which it leaves."""
    arguments.tensor("x", x)
    arguments.tensor("bias", bias, or_none=True)
    if not is_autocast(x) or x.dtype == torch.float64:
        return x, weight, bias
    dtype = torch.get_autocast_dtype(x.device.type)
    x, weight = (t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in (x, weight))
    if bias is not None and bias.is_floating_point() and bias.dtype != torch.float64:
        bias = bias.to(dtype)
    return x, weight, bias


def check_head(x: Tensor, weight: Tensor, bias: Tensor | None, frozen: Tensor | None) -> None:
    """A linear layer's types, dtypes, shapes and devices: x has the columns of the weight and of the frozen one."""
    arguments.floating("x", x)
    arguments.parameter("weight", weight, (weight.shape,), x, "x's")
    arguments.parameter("bias", bias, (weight.shape[:1],), x, "x's", or_none=True)
    frozen, rank = (weight, 0) if frozen is None else (frozen, weight.shape[1])
    if x.dim() == 0 or x.shape[-1] != frozen.shape[1] + rank:
        shape = (*x.shape[:-1], x.shape[-1] - rank) if x.dim() else ()
        raise ValueError(f"x has shape {shape} and must have weight's last dimension, {frozen.shape[1]}.")
    if rank:
        arguments.parameter_dtype("weight", frozen, x, "x's")
        arguments.device("weight", frozen, x, "x's")


def check_target(target: Tensor, x: Tensor, options: EachOptions) -> None:
    """Columns of the vocabulary, one for each token of x."""
    arguments.tensor("target", target)
    arguments.dtype("target", target, torch.int64, torch.int32)
    arguments.shape("target", target, parallel.whole_shape(x, options))
    arguments.device("target", target, x, "x's")


def check(inputs: LossInputs, options: Options) -> None:
    """Types, dtypes, shapes and devices."""
    x, weight, class_weight = inputs.x, inputs.weight, inputs.class_weight
    check_head(x, weight, inputs.bias, inputs.frozen)
    check_target(inputs.target, x, options)
    if class_weight is not None:
        arguments.tensor("class_weight", class_weight)
        arguments.shape("class_weight", class_weight, weight.shape[:1])
        if not class_weight.is_floating_point():
            raise TypeError(f"class_weight is {class_weight.dtype} and must be floating point.")
        arguments.device("class_weight", class_weight, x, "x's")
