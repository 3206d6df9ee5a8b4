"""Attention Residuals for training on Huawei Ascend NPUs, CUDA and CPUs."""

from .api import attn_res, fused_attnres
from .bank import attn_res_bank
from .explain import explain
from .keys import attn_res_keys
from .module import AttnRes, AttnResBank
from .patching import patch
from .pipeline import PipelineBlocks
from .records import AttnResResult, Phase1Result
from .two_phase import BlockAttnRes, attn_res_merge, attn_res_phase1

__all__ = [
    "AttnRes",
    "AttnResBank",
    "AttnResResult",
    "BlockAttnRes",
    "Phase1Result",
    "PipelineBlocks",
    "attn_res",
    "attn_res_bank",
    "attn_res_keys",
    "attn_res_merge",
    "attn_res_phase1",
    "explain",
    "fused_attnres",
    "patch",
]
