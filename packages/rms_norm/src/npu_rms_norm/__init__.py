"""RMSNorm for training on Huawei Ascend NPUs, CUDA and CPUs."""

from .functional import AddedRMSNorm, AddedWithFP32, WithFP32, add_rms_norm, gated_rms_norm, rms_norm
from .module import GatedRMSNorm, GemmaRMSNorm, LlamaRMSNorm, Olmo2RMSNorm, Qwen3RMSNorm, RMSNorm
from .patching import patch

__all__ = [
    "AddedRMSNorm",
    "AddedWithFP32",
    "GatedRMSNorm",
    "GemmaRMSNorm",
    "LlamaRMSNorm",
    "Olmo2RMSNorm",
    "Qwen3RMSNorm",
    "RMSNorm",
    "WithFP32",
    "add_rms_norm",
    "gated_rms_norm",
    "patch",
    "rms_norm",
]
