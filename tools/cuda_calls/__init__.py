"""Calls whose launches are every kernel that a CUDA device can be given, in every shape of tile that tilings choose for it.

Shapes are small and ragged: the last tile of rows and of columns is a partial one wherever there can be one.
"""

from collections.abc import Callable

import torch

from . import attn_res, cross_entropy, embedding, rms_norm
from .making import Calls

CALLS: dict[str, Callable[[torch.device], Calls]] = {
    "rms_norm": rms_norm.calls,
    "embedding": embedding.calls,
    "attn_res": attn_res.calls,
    "fused_linear_cross_entropy": cross_entropy.calls,
}
