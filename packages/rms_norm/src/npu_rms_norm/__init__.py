"""RMSNorm for training on Huawei Ascend NPUs, CUDA and CPUs."""

from .autograd import add_rms_norm, rms_norm
from .module import GemmaRMSNorm, LlamaRMSNorm, Olmo2RMSNorm, Qwen3RMSNorm, RMSNorm

__all__ = [
    "GemmaRMSNorm",
    "LlamaRMSNorm",
    "Olmo2RMSNorm",
    "Qwen3RMSNorm",
    "RMSNorm",
    "add_rms_norm",
    "rms_norm",
]
