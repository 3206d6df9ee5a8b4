"""LLaMA-Factory: `use_v1_kernels: npu_fused_rmsnorm`, and `kernel_config` of its version 1, make a model's norms ours.

LLaMA-Factory's kernel of that name gives `1 + weight` to the vendor's norm in bf16, and runs on npu alone. Ours takes its
place there, and stands on cuda and cpu too. Written against LLaMA-Factory 0.9.5.
"""

from __future__ import annotations

from typing import Any

from ..patching import patch

KERNEL = "npu_fused_rmsnorm"
_before: dict[str, Any] = {}


def register() -> None:
    """Let LLaMA-Factory's kernel for norms be `patch`; before a model is loaded."""
    from llamafactory.v1.accelerator.helper import DeviceType
    from llamafactory.v1.plugins.model_plugins.kernels import interface  # registers LLaMA-Factory's own
    from llamafactory.v1.plugins.model_plugins.kernels.base import BaseKernel
    from llamafactory.v1.plugins.model_plugins.kernels.registry import Registry

    class RMSNormKernel(BaseKernel):
        _kernel_id = KERNEL
        _device = [DeviceType.NPU, DeviceType.CUDA, DeviceType.CPU]

        @classmethod
        def apply(cls, **keywords: Any) -> Any:
            print(patch(keywords["model"]))
            return keywords["model"]

    assert interface.default_kernels is Registry._kernels
    if KERNEL not in _before:
        _before[KERNEL] = Registry._kernels.pop(KERNEL, None)
        Registry.register(RMSNormKernel)


def unregister() -> None:
    """Let LLaMA-Factory's kernel be its own again; models that are patched stay patched."""
    from llamafactory.v1.plugins.model_plugins.kernels.registry import Registry

    if KERNEL in _before:
        del Registry._kernels[KERNEL]
        before = _before.pop(KERNEL)
        if before is not None:
            Registry.register(before)
