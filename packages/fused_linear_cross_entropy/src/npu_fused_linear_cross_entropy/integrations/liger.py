"""Liger: the fused head of its patched models, and so of LLaMA-Factory, ms-swift, VeOmni and xtuner where they use Liger.

Written against liger-kernel 0.8.5.
"""

from __future__ import annotations

from typing import Any

import torch
from npu_tiling.models import Hook
from torch import Tensor

from ..api import fused_linear_cross_entropy
from ..call import LinearCrossEntropyOutput

PREFERENCE = 1  # Liger takes the lowest rank of what can run; its own begin at 10
_hook = Hook()


def liger_fused_linear_cross_entropy(
    _input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    *knobs: Any,
    mode: str | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """`fused_linear_cross_entropy` with the arguments and results of liger_kernel.functional's function of that name.

    Args:
        knobs: tuning of Liger's own kernels (`ce_impl`, `ce_mode`, `chunk_mem_const`), which ours ignore.
        mode: None or "default".

    Returns:
        loss, z_loss, token_accuracy, predicted_tokens; None where not asked for.
    """
    if mode not in (None, "default"):
        raise ValueError(f"mode is {mode!r} and must be None or 'default'.")
    outputs = fused_linear_cross_entropy(
        _input,
        weight,
        target,
        bias,
        class_weight=ce_weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        lse_square_scale=lse_square_scale,
        softcap=softcap,
        token_scaling=use_token_scaling,
        return_z_loss=return_z_loss,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        accum_dtype=accum_dtype,
    )
    if not isinstance(outputs, LinearCrossEntropyOutput):
        return outputs, None, None, None
    return outputs.loss, outputs.z_loss, outputs.token_accuracy, outputs.predicted_tokens


class LigerFusedLinearCrossEntropyFunction:
    """Stands for Liger's autograd function of that name: callers use `apply` alone."""

    apply = staticmethod(liger_fused_linear_cross_entropy)


def register() -> None:
    """Let `liger_kernel.functional`, its modules and patched models call ours."""
    import liger_kernel.ops
    from liger_kernel.backends import register_op

    register_op("fused_linear_cross_entropy", impl_name="npu-tiling", preference_rank=PREFERENCE)(
        liger_fused_linear_cross_entropy
    )
    name = LigerFusedLinearCrossEntropyFunction.__name__
    original = getattr(liger_kernel.ops, name)
    if original is not LigerFusedLinearCrossEntropyFunction:
        _hook.replace_everywhere("liger_kernel", name, original, LigerFusedLinearCrossEntropyFunction)


def unregister() -> None:
    """Let Liger call its own."""
    from liger_kernel.backends import registry

    registry._REGISTRY.pop(("fused_linear_cross_entropy", "npu-tiling"), None)
    registry._invalidate_available_cache()
    _hook.undo()
