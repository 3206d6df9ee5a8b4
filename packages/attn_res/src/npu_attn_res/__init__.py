"""Attention Residuals for training on Huawei Ascend NPUs, CUDA and CPUs."""

from .functional import attn_res, attn_res_merge, attn_res_phase1
from .module import AttnRes, BlockAttnRes

__all__ = ["AttnRes", "BlockAttnRes", "attn_res", "attn_res_merge", "attn_res_phase1"]
