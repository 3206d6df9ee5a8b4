"""RMSNorm for training on Huawei Ascend NPUs, CUDA and CPUs."""

from .autograd import add_rms_norm, rms_norm
from .module import GemmaRMSNorm, LlamaRMSNorm, Olmo2RMSNorm, Qwen3RMSNorm, RMSNorm
from .patching import patch

__all__ = [
    "GemmaRMSNorm",
    "LlamaRMSNorm",
    "Olmo2RMSNorm",
    "Qwen3RMSNorm",
    "RMSNorm",
    "add_rms_norm",
    "patch",
    "rms_norm",
]
