"""The records of `attn_res` and its gradient, the arguments and the results of each, and what public functions return.

From a record npu_tiling/calls.py derives the operator's schema, its fake function and the key of its plans. To add an
option, add a field; the public functions (api.py, bank.py) give it a value. Then let the definition (reference.py), the
plans (plans.py) and the kernels take it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from npu_tiling import Device
from npu_tiling.calls import Empty, Size
from npu_tiling.dispatch import exported
from torch import Tensor

from .ascend.tiling import statistics_by_token


class Forward(NamedTuple):
    """h, the sum of the sources with the weights of a softmax, and its RMSNorm. append and in_place are the update's alone.

    Attributes:
        blocks: N blocks [..., D] or, where `stacked`, one tensor of them [N, ..., D].
        device_count: how many blocks count, on the device, in place of n_blocks; None: there is none.
        prefix: [..., D], one more source; None: there is none.
        layer_output: is added to the prefix first; None: nothing is.
        query, rms_weight: [D].
        output_rms_weight: [D], of the RMSNorm of h; None: there is none.
        stacked: whether the blocks are one tensor.
        n_blocks: how many blocks count.
        eps, norm_eps: added to the mean squares of sources and of h.
        dtype: of h; None: that of the prefix, or of the blocks.
        save: whether to return s, r and lse: for a backward, and for the weights that a caller asks for.
        append: the new prefix is written behind the blocks.
        in_place: the new prefix is written where the prefix is.
    """

    blocks: Sequence[Tensor]
    device_count: Tensor | None
    prefix: Tensor | None
    layer_output: Tensor | None
    query: Tensor
    rms_weight: Tensor
    output_rms_weight: Tensor | None
    stacked: bool
    n_blocks: Size
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

    def results(self, chip: Device | None) -> dict[str, Empty | None]:
        """h [..., D] and its RMSNorm, the new prefix; s and r of the sources, [sources, T], lse [T] and 1 / rms(h) [T]."""
        like, has_norm = self.like, self.output_rms_weight is not None
        shape = like.shape[1:] if self.stacked and self.prefix is None else like.shape
        h = Empty(shape, self.dtype or like.dtype)
        is_wide = torch.float64 in [source.dtype for source in (*self.blocks, like)]
        dtype, n_tokens = torch.float64 if is_wide else torch.float32, prod(shape[:-1])
        by_token = self.save and chip is not None and keeps_by_token(self, h.dtype, chip)
        scores = Empty((self.n_blocks + int(self.prefix is not None), n_tokens), dtype, last_outermost=by_token)
        of_tokens = Empty((n_tokens,), dtype)
        new_prefix = None
        if self.prefix is not None and self.layer_output is not None and not self.in_place:
            new_prefix = Empty(shape, self.prefix.dtype)
        return {
            "h": h,
            "y": h if has_norm else None,
            "new_prefix": new_prefix,
            "score": scores if self.save else None,
            "rstd": scores if self.save else None,
            "lse": of_tokens if self.save else None,
            "norm_rstd": of_tokens if self.save and has_norm else None,
        }

    def flops(self) -> int:
        """Of the products: <g, v_i> of each source, and the sum of alpha_i v_i."""
        rows = self.like.shape[1:] if self.stacked and self.prefix is None else self.like.shape
        return 4 * (self.n_blocks + int(self.prefix is not None)) * prod(rows)


class Backward(NamedTuple):
    """The gradients of the sources and of the weights.

    Attributes:
        dh, dy, dprefix: the gradients of h, of its RMSNorm and of the new prefix; None: there is none.
        h: the forward's, where the backward reads it.
        blocks, device_count, query, rms_weight, output_rms_weight, stacked, n_blocks: the forward's.
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
    device_count: Tensor | None
    prefix: Tensor | None
    query: Tensor
    rms_weight: Tensor
    output_rms_weight: Tensor | None
    score: Tensor
    rstd: Tensor
    lse: Tensor
    norm_rstd: Tensor | None
    stacked: bool
    n_blocks: Size
    need_blocks: Sequence[bool]
    need_prefix: bool
    need_weights: Sequence[bool]

    def results(self) -> dict[str, Any]:
        """The gradients of the blocks, of the prefix with the layer's output, and of the weights; None where not needed."""
        return {
            "dblocks": gradients_of(self.blocks, self.need_blocks),
            "dprefix_sum": gradient_of(self.prefix, self.need_prefix),
            **weight_gradients(self),
        }

    def flops(self) -> int:
        """See `gradient_flops`."""
        n_needed, need_g = needed_blocks(self) + self.need_prefix, any(self.need_weights[:2])
        return gradient_flops(self.score, self.query.shape[-1], len(self.score), n_needed, need_g)


def needed_blocks(call: Any) -> int:
    """How many blocks of a `Backward` or of a first phase's need a gradient."""
    if not call.stacked:
        return sum(call.need_blocks)
    return call.need_blocks[0] * (len(call.score) - (getattr(call, "prefix", None) is not None))


def gradient_flops(score: Tensor, width: int, n_sources: int, n_needed: int, need_g: bool) -> int:
    """Of the products of each query's gradient: <dh, v_i>; alpha_i dh and ds_i g where v_i needs one; ds_i v_i if g does."""
    return 2 * width * (score.numel() // n_sources) * (n_sources * (1 + need_g) + 2 * n_needed)


DWEIGHTS = ("dquery", "drms_weight", "doutput_rms_weight")


def weight_gradients(call: Any) -> dict[str, Empty | None]:
    """The gradients of query, rms_weight and output_rms_weight among a record's results."""
    weights = (call.query, call.rms_weight, call.output_rms_weight)
    return dict(zip(DWEIGHTS, gradients_of(weights, call.need_weights), strict=True))


def gradients_of(tensors: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Empty | None]:
    """`gradient_of` of each."""
    return [gradient_of(tensor, need) for tensor, need in zip(tensors, needed, strict=True)]


def gradient_of(tensor: Tensor | None, needed: bool) -> Empty | None:
    """Contiguous memory for a gradient; None where it is not needed."""
    return Empty(tensor.shape, tensor.dtype) if needed and tensor is not None else None


def keeps_by_token(call: Forward | Backward, dtype: torch.dtype, chip: Device) -> bool:
    """Whether score and rstd lie [T, sources] in memory, where h has this dtype."""
    if chip.kind != "ascend":
        return False
    source = call.blocks[0] if len(call.blocks) else call.prefix
    assert source is not None
    itemsize, n_rows = max(source.dtype.itemsize, dtype.itemsize), call.n_blocks + int(call.prefix is not None)
    return statistics_by_token(int(source.shape[-1]), itemsize, n_rows, chip)


def reads_h(h: Tensor, chip: Device | None) -> bool:
    """Whether the backward computes delta from h: on Ascend where h is fp32. Otherwise it sums delta over the sources."""
    return h.dtype == torch.float32 and chip is not None and chip.kind == "ascend"


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
