"""RMSNorm for training on Huawei Ascend NPUs, CUDA and CPUs."""

from .api import (
    QKV,
    AddedDynamicQuant,
    AddedRMSNorm,
    AddedWithFP32,
    DynamicQuant,
    WithFP32,
    add_rms_norm,
    add_rms_norm_dynamic_quant,
    gated_rms_norm,
    qk_rms_norm,
    rms_norm,
    rms_norm_dynamic_quant,
)
from .explain import explain
from .integrations import use_kernels
from .module import GatedRMSNorm, GemmaRMSNorm, LlamaRMSNorm, Olmo2RMSNorm, Qwen3RMSNorm, RMSNorm
from .patching import patch

__all__ = [
    "AddedDynamicQuant",
    "AddedRMSNorm",
    "AddedWithFP32",
    "QKV",
    "DynamicQuant",
    "GatedRMSNorm",
    "GemmaRMSNorm",
    "LlamaRMSNorm",
    "Olmo2RMSNorm",
    "Qwen3RMSNorm",
    "RMSNorm",
    "WithFP32",
    "add_rms_norm",
    "add_rms_norm_dynamic_quant",
    "explain",
    "gated_rms_norm",
    "patch",
    "qk_rms_norm",
    "rms_norm",
    "rms_norm_dynamic_quant",
    "use_kernels",
]
