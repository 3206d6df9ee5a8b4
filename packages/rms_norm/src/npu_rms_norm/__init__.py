"""RMSNorm for training on Huawei Ascend NPUs, CUDA and CPUs."""

from .functional import add_rms_norm, gated_rms_norm, rms_norm
from .module import GatedRMSNorm, GemmaRMSNorm, LlamaRMSNorm, Olmo2RMSNorm, Qwen3RMSNorm, RMSNorm
from .patching import patch
from .results import AddedRMSNorm, AddedWithFP32, WithFP32

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
