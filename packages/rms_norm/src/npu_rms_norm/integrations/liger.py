"""Liger: the norms of its patched models, and so of LLaMA-Factory, ms-swift, VeOmni and xtuner where they use Liger.

Written against liger-kernel 0.8.5.
"""

from __future__ import annotations

from typing import Any

from npu_tiling.models import Hook
from torch import Tensor

from ..api import add_rms_norm, rms_norm

PREFERENCE = 1  # Liger takes the lowest rank of what can run; its own begin at 10
_hook = Hook()


def liger_rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = False,
    *knobs: Any,
    mode: str | None = None,
) -> Tensor:
    """`rms_norm` with the arguments of liger_kernel.functional.rms_norm.

    Args:
        in_place: see `rms_norm`.
        knobs: what Liger's own kernels are tuned with (`row_mode`); ours have none of them.
        mode: None or "default".
    """
    _check_mode(mode)
    y = rms_norm(x, weight, eps, offset=offset, casting_mode=casting_mode, in_place=in_place)
    assert isinstance(y, Tensor)
    return y


def liger_fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = False,
    *,
    mode: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` with the arguments and results of liger_kernel.functional.fused_add_rms_norm: y and x + residual."""
    _check_mode(mode)
    y, total = add_rms_norm(x, residual, weight, eps, offset=offset, casting_mode=casting_mode, in_place=in_place)
    return y, total


class LigerRMSNormFunction:
    """Stands for Liger's autograd function of that name: callers use `apply` alone."""

    apply = staticmethod(liger_rms_norm)


class LigerFusedAddRMSNormFunction:
    """Stands for Liger's autograd function of that name."""

    apply = staticmethod(liger_fused_add_rms_norm)


def register() -> None:
    """Let `liger_kernel.functional`, its modules and patched models call ours."""
    import liger_kernel.ops
    from liger_kernel.backends import register_op

    register_op("rms_norm", impl_name="npu-tiling", preference_rank=PREFERENCE)(liger_rms_norm)
    register_op("fused_add_rms_norm", impl_name="npu-tiling", preference_rank=PREFERENCE)(liger_fused_add_rms_norm)
    for ours in (LigerRMSNormFunction, LigerFusedAddRMSNormFunction):
        original = getattr(liger_kernel.ops, ours.__name__)
        if original is not ours:
            _hook.replace_everywhere("liger_kernel", ours.__name__, original, ours)


def unregister() -> None:
    """Let Liger call its own."""
    from liger_kernel.backends import registry

    for name in ("rms_norm", "fused_add_rms_norm"):
        registry._REGISTRY.pop((name, "npu-tiling"), None)
    registry._invalidate_available_cache()
    _hook.undo()


def _check_mode(mode: str | None) -> None:
    if mode not in (None, "default"):
        raise ValueError(f"mode is {mode!r} and must be None or 'default'.")
