"""What the public functions return where that is more than one tensor."""

from __future__ import annotations

from typing import NamedTuple

from npu_tiling.pytorch.exporting import exported
from torch import Tensor


@exported
class AttnResResult(NamedTuple):
    """What `attn_res`, `attn_res_bank` and `attn_res_merge` return; None for what was not asked for.

    Attributes:
        output: h [..., D].
        normalized: RMSNorm(h) [..., D].
        prefix: the prefix [..., D], with the layer's output added; None from `attn_res`, which has none.
        weights: alpha [N, ...] in fp32, one for each block; from `attn_res_bank` [N + 1, ...], the prefix's last, where N is
            the bank's capacity if n_blocks is a tensor.
    """

    output: Tensor
    normalized: Tensor | None = None
    prefix: Tensor | None = None
    weights: Tensor | None = None


@exported
class Phase1Result(NamedTuple):
    """What `attn_res_phase1` returns, in fp32, for each of S layers.

    Attributes:
        o: the sum of softmax_i(s_i) v_i, [S, ..., D].
        lse: the logarithm of the sum of exp(s_i), [S, ...].
    """

    o: Tensor
    lse: Tensor
