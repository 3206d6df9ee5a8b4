"""RMSNorm for training on Huawei Ascend NPUs, CUDA and CPUs."""

from .explain import explain
from .functional import add_rms_norm, rms_norm
from .gated import gated_rms_norm
from .kernel_mapping import use_kernels
from .module import GatedRMSNorm, GemmaRMSNorm, LlamaRMSNorm, Olmo2RMSNorm, Qwen3RMSNorm, RMSNorm
from .patching import patch
from .qkv import qk_rms_norm
from .quantised import add_rms_norm_dynamic_quant, rms_norm_dynamic_quant
from .results import QKV, AddedDynamicQuant, AddedRMSNorm, AddedWithFP32, DynamicQuant, WithFP32

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
