"""The arguments of the operators, in their order: records that registration, definition and launches share.

To add an option, add a field here: the schema is made of the fields. Operators (operators) and public functions
(functional.py, bank.py) pass the fields in this order. Then let the definition (cpu.py, reference.py), the launch (launch)
and the kernels take it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Forward(NamedTuple):
    """The arguments of `attn_res`. The last two, append and in_place, are of `attn_res_update` alone.

    Attributes:
        blocks: N blocks [..., D] or, where `stacked`, one tensor of them [N, ..., D].
        n_blocks: how many blocks count.
        device_count: how many blocks count, on the device, in place of n_blocks; None: there is none.
        prefix: [..., D], one more source; None: there is none.
        layer_output: is added to the prefix first; None: nothing is.
        query, rms_weight: [D].
        output_rms_weight: [D], of the RMSNorm of h; None: there is none.
        eps, norm_eps: added to the mean squares of sources and of h.
        dtype: of h; None: that of the prefix, or of the blocks.
        save: whether to return s, r and lse: for a backward, and for the weights that a caller asks for.
        append: the new prefix is written behind the blocks.
        in_place: the new prefix is written where the prefix is.
    """

    blocks: Sequence[Tensor]
    stacked: bool
    n_blocks: int
    device_count: Tensor | None
    prefix: Tensor | None
    layer_output: Tensor | None
    query: Tensor
    rms_weight: Tensor
    output_rms_weight: Tensor | None
    eps: float
    norm_eps: float
    dtype: torch.dtype | None
    save: bool
    append: bool = False
    in_place: bool = False

    @property
    def like(self) -> Tensor:
        """The prefix, or without one the first block: h has its device, and its dtype unless `dtype` says another."""
        return self.blocks[0] if self.prefix is None else self.prefix


class Backward(NamedTuple):
    """The arguments of `attn_res_backward`.

    Attributes:
        dh, dy, dprefix: the gradients of h, of its RMSNorm and of the new prefix; None: there is none.
        h: the forward's, where the backward reads it.
        blocks, stacked, n_blocks, device_count, query, rms_weight, output_rms_weight: the forward's.
        prefix: the forward's, with the layer's output added.
        score, rstd, lse, norm_rstd: the forward's statistics.
        need_blocks: which tensors of blocks need a gradient.
        need_prefix: the prefix does.
        need_weights: which of query, rms_weight and output_rms_weight do.
    """

    dh: Tensor | None
    dy: Tensor | None
    dprefix: Tensor | None
    h: Tensor | None
    blocks: Sequence[Tensor]
    stacked: bool
    n_blocks: int
    device_count: Tensor | None
    prefix: Tensor | None
    query: Tensor
    rms_weight: Tensor
    output_rms_weight: Tensor | None
    score: Tensor
    rstd: Tensor
    lse: Tensor
    norm_rstd: Tensor | None
    need_blocks: Sequence[bool]
    need_prefix: bool
    need_weights: Sequence[bool]


class Phase1(NamedTuple):
    """The arguments of `phase1`: as those of `attn_res`, with queries [S, D] and rms_weight [D] or [S, D]."""

    queries: Tensor
    blocks: Sequence[Tensor]
    stacked: bool
    rms_weight: Tensor
    eps: float
    save: bool


class Phase1Backward(NamedTuple):
    """The arguments of `phase1_backward`.

    Attributes:
        do, dlse: the gradients of o [T, S, D] and of lse [S, T]; None: there is none.
        queries, blocks, stacked, rms_weight: the forward's.
        score, rstd: the forward's statistics.
        need_blocks: which tensors of blocks need a gradient.
        need_weights: which of queries and rms_weight do.
    """

    do: Tensor | None
    dlse: Tensor | None
    queries: Tensor
    blocks: Sequence[Tensor]
    stacked: bool
    rms_weight: Tensor
    score: Tensor
    rstd: Tensor
    need_blocks: Sequence[bool]
    need_weights: Sequence[bool]


class Merge(NamedTuple):
    """The arguments of `merge`: o [..., D] and lse [...] of one layer, and otherwise as those of `attn_res`."""

    o: Tensor
    lse: Tensor
    prefix: Tensor
    layer_output: Tensor | None
    query: Tensor
    rms_weight: Tensor
    output_rms_weight: Tensor | None
    eps: float
    norm_eps: float
    save: bool


class MergeBackward(NamedTuple):
    """The arguments of `merge_backward`: as those of `attn_res_backward`, with o and lse in place of blocks."""

    dh: Tensor | None
    dy: Tensor | None
    dprefix: Tensor | None
    h: Tensor | None
    o: Tensor
    lse: Tensor
    prefix: Tensor
    query: Tensor
    rms_weight: Tensor
    output_rms_weight: Tensor | None
    score: Tensor
    rstd: Tensor
    norm_rstd: Tensor | None
    need_weights: Sequence[bool]
