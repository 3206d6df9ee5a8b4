"""Attention Residuals for training on Huawei Ascend NPUs, CUDA and CPUs."""

from .bank import BankResult, attn_res_bank
from .functional import attn_res, attn_res_merge, attn_res_phase1
from .module import AttnRes, BlockAttnRes

__all__ = ["AttnRes", "BankResult", "BlockAttnRes", "attn_res", "attn_res_bank", "attn_res_merge", "attn_res_phase1"]
