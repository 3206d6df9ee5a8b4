"""The two phases' records, and their definition in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from npu_tiling.calls import Empty
from npu_tiling.tensors import statistics_dtype, without_autocast
from torch import Tensor

from .. import reference
from ..records import gradients_of, weight_gradients
from ..reference import flat, fuse_qk_weight


class Phase1(NamedTuple):
    """The first phase of several layers: as `Forward`, with queries [S, D] and rms_weight [D] or [S, D]."""

    queries: Tensor
    blocks: Sequence[Tensor]
    rms_weight: Tensor
    stacked: bool
    eps: float
    save: bool

    def results(self) -> dict[str, Empty | None]:
        """o [T, S, D] and lse [S, T]; the statistics s [N, T, S] and r [N, T]."""
        first, n_layers = self.blocks[0], self.queries.shape[0]
        shape, dtype = first.shape[1:] if self.stacked else first.shape, statistics_dtype(first.dtype)
        n_blocks, n_tokens = first.shape[0] if self.stacked else len(self.blocks), prod(shape[:-1])
        return {
            "o": Empty((n_tokens, n_layers, shape[-1]), dtype),
            "lse": Empty((n_layers, n_tokens), dtype),
            "score": Empty((n_blocks, n_tokens, n_layers), dtype) if self.save else None,
            "rstd": Empty((n_blocks, n_tokens), dtype) if self.save else None,
        }


class Phase1Backward(NamedTuple):
    """The gradients of the first phase.

    Attributes:
        do, dlse: the gradients of o [T, S, D] and of lse [S, T]; None: there is none.
        queries, blocks, rms_weight, stacked: the forward's.
        score, rstd: the forward's statistics.
        need_blocks: which tensors of blocks need a gradient.
        need_weights: which of queries and rms_weight do.
    """

    do: Tensor | None
    dlse: Tensor | None
    queries: Tensor
    blocks: Sequence[Tensor]
    rms_weight: Tensor
    score: Tensor
    rstd: Tensor
    stacked: bool
    need_blocks: Sequence[bool]
    need_weights: Sequence[bool]

    def results(self) -> dict[str, Any]:
        """The gradients of blocks, queries and rms_weight; None for those that are not needed."""
        dqueries, dnorm = gradients_of((self.queries, self.rms_weight), self.need_weights)
        return {
            "dblocks": gradients_of(self.blocks, self.need_blocks),
            "dqueries": dqueries,
            "drms_weight": dnorm,
        }


class Merge(NamedTuple):
    """The second phase: o [..., D] and lse [...] of one layer, and otherwise as `Forward`."""

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

    def results(self) -> dict[str, Empty | None]:
        """h, its RMSNorm and the new prefix [..., D]; the statistics s, r and 1 / rms(h) [T]."""
        rows = Empty(self.prefix.shape, self.prefix.dtype)
        of_tokens, has_norm = Empty((self.lse.numel(),), self.lse.dtype), self.output_rms_weight is not None
        return {
            "h": rows,
            "y": rows if has_norm else None,
            "new_prefix": None if self.layer_output is None else rows,
            "score": of_tokens if self.save else None,
            "rstd": of_tokens if self.save else None,
            "norm_rstd": of_tokens if self.save and has_norm else None,
        }


class MergeBackward(NamedTuple):
    """The gradients of the second phase: as `Backward`, with o and lse in place of blocks."""

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

    def results(self) -> dict[str, Empty | None]:
        """The gradients of o, lse, the prefix with the layer's output, and the weights; None for weights that need none."""
        state = {"do": self.o, "dlse": self.lse, "dprefix_sum": self.prefix}
        return {name: Empty(of.shape, of.dtype) for name, of in state.items()} | weight_gradients(self)


@without_autocast
def compute_phase1(call: Phase1) -> tuple[Tensor | None, ...]:
    """See `Phase1.results`."""
    v = reference.Sources(call)
    score, rstd = v.scores(fuse_qk_weight(call.queries, call.rms_weight, v.dtype), call.eps)
    alpha, lse = reference.softmax(score)
    return v.weighted_sum(alpha, v.dtype), lse.t().contiguous(), *((score, rstd) if call.save else (None, None))


@without_autocast
def compute_phase1_backward(call: Phase1Backward) -> tuple[Any, ...]:
    """See `Phase1Backward.results`."""
    v, do, score = reference.Sources(call), call.do, call.score
    g = fuse_qk_weight(call.queries, call.rms_weight, v.dtype)
    if do is None:
        do = score.new_zeros((*score.shape[1:], v.width))
    alpha, ds_rstd, coefficient = reference.score_gradients(score, call.rstd, v.products(do), call.dlse, v.width)
    dg = v.gradients(do, g, alpha, ds_rstd, coefficient)
    dweights = reference.fuse_qk_weight_backward(dg, call.queries, call.rms_weight, call.need_weights)
    return _contiguous(v.dv), *_contiguous(dweights)


@without_autocast
def compute_merge(call: Merge) -> tuple[Tensor | None, ...]:
    """See `Merge.results`."""
    prefix, new_prefix, dtype = call.prefix, None, call.o.dtype
    if call.layer_output is not None:
        prefix = new_prefix = (prefix.to(dtype) + call.layer_output).to(prefix.dtype)
    o, p = flat(call.o), flat(prefix).to(dtype)
    rstd = torch.rsqrt(p.square().mean(-1) + call.eps)
    score = (p @ fuse_qk_weight(call.query, call.rms_weight, dtype)) * rstd
    w, a = shares(call.lse.reshape(-1), score)
    h = (o * w.unsqueeze(-1) + p * a.unsqueeze(-1)).to(prefix.dtype)
    norm_rstd = y = None
    if call.output_rms_weight is not None:
        norm_rstd = torch.rsqrt(h.to(dtype).square().mean(-1) + call.norm_eps)
        y = reference.scaled(h, call.output_rms_weight, norm_rstd).view(prefix.shape)
    statistics = (score, rstd, norm_rstd) if call.save else (None, None, None)
    return tuple(_contiguous([h.view(prefix.shape), y, new_prefix, *statistics]))


@without_autocast
def compute_merge_backward(call: MergeBackward) -> tuple[Tensor | None, ...]:
    """See `MergeBackward.results`."""
    dh, dweight = reference.gradient_of_h(call)
    return *compute_merge_backward_of_h(call, dh), *_contiguous([dweight])


def compute_merge_backward_of_h(call: MergeBackward, dh: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of o, lse, the prefix, with `dprefix` added, query and rms_weight, from dh [..., D]."""
    score, rstd, dtype = call.score, call.rstd, call.o.dtype
    o, dh, p = flat(call.o), flat(dh).to(dtype), flat(call.prefix).to(dtype)
    w, a = shares(call.lse.reshape(-1), score)
    dscore = a * w * ((dh * p).sum(-1) - (dh * o).sum(-1))
    ds_rstd = dscore * rstd
    dv_coef = ds_rstd * score * rstd / call.prefix.shape[-1]
    g = fuse_qk_weight(call.query, call.rms_weight, dtype)
    dp = dh * a.unsqueeze(-1) + ds_rstd.unsqueeze(-1) * g - dv_coef.unsqueeze(-1) * p
    if call.dprefix is not None:
        dp = dp + flat(call.dprefix)
    gradients = (
        (dh * w.unsqueeze(-1)).view(call.o.shape),
        -dscore.view(call.lse.shape),
        dp.to(call.prefix.dtype).view(call.prefix.shape),
        *reference.fuse_qk_weight_backward(ds_rstd @ p, call.query, call.rms_weight, call.need_weights),
    )
    return tuple(_contiguous(gradients))


def shares(lse: Tensor, score: Tensor) -> tuple[Tensor, Tensor]:
    """exp(lse) and exp(score) over their sum."""
    largest = torch.maximum(lse, score)
    first, second = torch.exp(lse - largest), torch.exp(score - largest)
    total = first + second
    return first / total, second / total


def _contiguous(results: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Results with the strides that records promise: those of PyTorch's operators follow the inputs."""
    return [None if result is None else result.contiguous() for result in results]
