"""Attention Residuals for training on Huawei Ascend NPUs, CUDA and CPUs."""

from .bank import attn_res_bank
from .functional import attn_res, attn_res_merge, attn_res_phase1, fused_attnres
from .module import AttnRes, BlockAttnRes
from .results import AttnResResult, Phase1Result

__all__ = [
    "AttnRes",
    "AttnResResult",
    "BlockAttnRes",
    "Phase1Result",
    "attn_res",
    "attn_res_bank",
    "attn_res_merge",
    "attn_res_phase1",
    "fused_attnres",
]
