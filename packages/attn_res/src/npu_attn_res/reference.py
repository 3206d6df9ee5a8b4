"""Attention Residuals in plain PyTorch: the definition, and what runs on a CPU.

    r_i = 1 / sqrt(mean(v_i^2) + eps)        s_i = r_i <g, v_i>        g = query * rms_weight
    alpha = softmax_i(s)                     h = sum_i alpha_i v_i

in fp32 (fp64 for fp64 input), rounded once, to v's dtype. Sources v_i are rows [T, D], statistics are [sources, T, S], with
one layer for `attn_res` and S layers for the first of two phases. Plans take the functions of small tensors from here.

Source: "Attention Residuals", arXiv 2603.15031.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from npu_tiling.calls import statistics_dtype
from torch import Tensor

from .records import Backward, Forward


def scaled_query(query: Tensor, scale: float) -> Tensor:
    """scale * query, in fp32 where it changes."""
    return query if scale == 1.0 else query.to(torch.promote_types(query.dtype, torch.float32)) * scale


def compute_forward(call: Forward) -> tuple[Tensor | None, ...]:
    """The forward: see `Forward.results`."""
    prefix, x = call.prefix, call.layer_output
    if prefix is not None and x is not None:
        wide = statistics_dtype(torch.promote_types(prefix.dtype, x.dtype))
        total = (prefix.to(wide) + x.to(wide)).to(prefix.dtype)
        prefix = prefix.copy_(total) if call.in_place else total.contiguous()
    if call.append:
        assert prefix is not None
        _append(call, prefix)
    v = Sources(call._replace(prefix=prefix))
    score, rstd = v.scores(fuse_qk_weight(call.query, call.rms_weight, v.dtype).unsqueeze(0), call.eps)
    alpha, lse = softmax(score)
    h = v.weighted_sum(alpha, call.dtype or call.like.dtype).squeeze(1)
    norm_rstd = y = None
    shape = call.like.shape[1:] if call.stacked and prefix is None else call.like.shape
    if call.output_rms_weight is not None:
        norm_rstd = torch.rsqrt(h.to(v.dtype).square().mean(-1) + call.norm_eps)
        y = scaled(h, call.output_rms_weight, norm_rstd).view(shape)
    results = h.view(shape), y, None if x is None or call.in_place else prefix
    return *results, *((score.squeeze(-1), rstd, lse.squeeze(-1), norm_rstd) if call.save else (None,) * 4)


def compute_backward(call: Backward) -> tuple[Any, ...]:
    """The gradients: see `Backward.results`."""
    dh, dweight = gradient_of_h(call)
    return *compute_backward_of_h(call, dh), dweight


def compute_backward_of_h(call: Backward, dh: Tensor) -> tuple[Any, ...]:
    """The gradients of the blocks, the prefix, query and rms_weight, from that of h."""
    v = Sources(call)
    score, rstd = v.counted(call.score, call.rstd)
    g, do = fuse_qk_weight(call.query, call.rms_weight, v.dtype).unsqueeze(0), dh.reshape(-1, 1, v.width)
    alpha, ds_rstd, coefficient = score_gradients(score.unsqueeze(-1), rstd, v.products(do), None, v.width)
    dg = v.gradients(do, g, alpha, ds_rstd, coefficient)
    return v.dv, v.dprefix_sum, *fuse_qk_weight_backward(dg, call.query, call.rms_weight, call.need_weights)


def gradient_of_h(call: Any) -> tuple[Tensor, Tensor | None]:
    """The whole gradient of h, and that of output_rms_weight. The first has what comes through the RMSNorm, not rounded."""
    if call.dy is None:
        return call.dh, None
    return normalise_backward(call.dy, call.dh, call.h, call.output_rms_weight, call.norm_rstd)


class Sources:
    """The blocks and the prefix of a call, as rows, and the sums over them.

    Attributes:
        dtype: of the arithmetic and of what is not rounded.
        width: D.
        dv: the gradient of each tensor of blocks, once `gradients` has computed it; None where it is not needed.
        dprefix_sum: the gradient of the prefix, with the call's dprefix added.
    """

    def __init__(self, call: Any) -> None:
        """For a record that has blocks; prefix, device_count and what is needed are those that it has."""
        sources: Sequence[Tensor] = call.blocks
        needed: Sequence[bool] = getattr(call, "need_blocks", ())
        prefix, device_count = getattr(call, "prefix", None), getattr(call, "device_count", None)
        n_blocks = getattr(call, "n_blocks", None) if device_count is None else None
        dprefix = getattr(call, "dprefix", None)
        self._sources, self._stacked, self._needed, self._prefix = sources, call.stacked, needed, prefix
        self._dprefix = None if dprefix is None else flat(dprefix)
        self._rows = [flat(source) for source in (sources[0].unbind()[:n_blocks] if call.stacked else sources)]
        self._mask = (
            None if device_count is None else torch.arange(len(self._rows), device=device_count.device) < device_count
        )
        if self._mask is not None:  # what lies behind the last block may be anything
            self._rows = [torch.where(counts, row, 0.0) for counts, row in zip(self._mask, self._rows, strict=True)]
        self._need_rows = [needed[0]] * len(self._rows) if call.stacked and needed else list(needed)
        if prefix is not None:
            self._rows.append(flat(prefix))
            self._need_rows.append(getattr(call, "need_prefix", False))
        self.width = self._rows[-1].shape[-1]
        self.dtype = torch.float64 if any(row.dtype == torch.float64 for row in self._rows) else torch.float32
        self.dv: list[Tensor | None] = []
        self.dprefix_sum: Tensor | None = None

    def scores(self, g: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """s [N, T, S] and r [N, T] with g [S, D]."""
        score, rstd = [], []
        for row in self._rows:
            v = row.to(self.dtype)
            rstd.append(torch.rsqrt(v.square().mean(-1) + eps))
            # A matrix product's sums of a row depend on the number of rows. For one layer other sums cost little more.
            dot = (v * g).sum(-1, keepdim=True) if len(g) == 1 else v @ g.T
            score.append(dot * rstd[-1].unsqueeze(-1))
        if self._mask is not None:
            low = torch.finfo(self.dtype).min / 4  # not -inf: this times zero must be zero
            score[:-1] = [torch.where(counts, each, low) for counts, each in zip(self._mask, score, strict=False)]
        return torch.stack(score), torch.stack(rstd)

    def counted(self, score: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
        """Statistics [N, T] that kernels wrote: those of blocks that do not count are memory without a value."""
        if self._mask is None:
            return score, rstd
        counts = torch.cat((self._mask, self._mask.new_ones(len(score) - len(self._mask)))).unsqueeze(-1)
        return torch.where(counts, score, torch.finfo(score.dtype).min / 4), torch.where(counts, rstd, 0.0)

    def weighted_sum(self, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """[T, S, D] in `dtype`: the sum of the sources with weights [N, T, S]."""
        total = weights.new_zeros((*weights.shape[1:], self.width))
        for row, weight in zip(self._rows, weights, strict=True):
            total += weight.unsqueeze(-1) * row.to(self.dtype).unsqueeze(1)
        return total.to(dtype)

    def products(self, do: Tensor) -> Tensor:
        """<do, v_i> [N, T, S] of do [T, S, D]."""
        do = do.to(self.dtype)
        return torch.stack([(do @ row.to(self.dtype).unsqueeze(-1)).squeeze(-1) for row in self._rows])

    def gradients(self, do: Tensor, g: Tensor, weights: Tensor, ds_rstd: Tensor, dv_coef: Tensor) -> Tensor:
        """Computes dv_i = sum over layers of (weight do + ds_rstd g) - dv_coef v_i for the sources that need it.

        do is [T, S, D], g [S, D], weights and ds_rstd [N, T, S], dv_coef [N, T].

        Returns:
            dg [S, D], the sum over sources and tokens of ds_rstd v_i.
        """
        do, dg = do.to(self.dtype), torch.zeros_like(g)
        dv: list[Tensor | None] = []
        for i, row in enumerate(self._rows):
            v = row.to(self.dtype)
            dg = dg + ds_rstd[i].T @ v  # not in place: under torch.func.vmap dg gets a dimension
            if not self._need_rows[i]:
                dv.append(None)
                continue
            gradient = (weights[i].unsqueeze(1) @ do).squeeze(1) + ds_rstd[i] @ g - dv_coef[i].unsqueeze(-1) * v
            if self._dprefix is not None and i == len(self._rows) - 1:
                gradient = gradient + self._dprefix
            dv.append(gradient.to(row.dtype))
        if self._prefix is not None:
            of_prefix = dv.pop()
            self.dprefix_sum = None if of_prefix is None else of_prefix.view(self._prefix.shape)
        if self._stacked:
            dv = self._in_one(dv)
        self.dv = [None if each is None else each.view(of.shape) for each, of in zip(dv, self._sources, strict=True)]
        return dg

    def _in_one(self, dv: list[Tensor | None]) -> list[Tensor | None]:
        """The gradient of a stacked tensor: zero for blocks behind those that count."""
        (source,) = self._sources
        if not self._needed[0]:
            return [None]
        zeros = [torch.zeros_like(flat(source[i])) for i in range(len(dv), len(source))]
        stacked = [each for each in (*dv, *zeros) if each is not None]
        return [torch.stack(stacked) if len(source) else torch.zeros_like(source)]


def flat(rows: Tensor) -> Tensor:
    """[..., D] as [T, D]."""
    return rows.reshape(-1, rows.shape[-1])


def fuse_qk_weight(query: Tensor, rms_weight: Tensor, dtype: torch.dtype) -> Tensor:
    """g in the arithmetic's dtype."""
    return query.to(dtype) * rms_weight.to(dtype)


def fuse_qk_weight_backward(
    dg: Tensor, query: Tensor, rms_weight: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of query [S, D] and rms_weight [D] or [S, D] (or of both [D]) from dg [S, D], where needed."""
    dquery = (dg * rms_weight).view(query.shape).to(query.dtype) if needed[0] else None
    dnorm = (dg * query).sum_to_size(rms_weight.shape).to(rms_weight.dtype) if needed[1] else None
    return dquery, dnorm


def score_gradients(
    score: Tensor, rstd: Tensor, e: Tensor, dlse: Tensor | None, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """alpha and ds r [N, T, S], and the sum over layers of ds s r^2 / D [N, T]; the gradient goes through s_i and r_i.

    score and e = <do, v_i> are [N, T, S], rstd [N, T]; dlse [S, T] is the gradient of log(sum(exp(s))), None: there is none.
    """
    alpha, _ = softmax(score)
    dscore = alpha * (e - (alpha * e).sum(0))
    dscore = dscore if dlse is None else dscore + alpha * dlse.t()
    ds_rstd = dscore * rstd.unsqueeze(-1)
    return alpha, ds_rstd, (ds_rstd * score).sum(-1) * rstd / width


def softmax(score: Tensor) -> tuple[Tensor, Tensor]:
    """alpha_i = exp(s_i) / sum_i exp(s_i), and the logarithm of that sum, whose rounding exp(s_i - lse) would feel."""
    maximum = score.amax(0)
    weights = torch.exp(score - maximum)
    # One token's at a time: PyTorch adds in an order that is the same for any number of tokens.
    total = weights.movedim(0, -1).contiguous().sum(-1)
    return weights / total, maximum + total.log()


def scaled(h: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    """h * rstd * weight in h's dtype."""
    return (h.to(rstd.dtype) * rstd.unsqueeze(-1) * weight).to(h.dtype)


def normalise_backward(dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of h [..., D], dh with it, not rounded, and that of the weight; rstd is [T]."""
    rstd = rstd.view(h.shape[:-1])
    dy = dy.to(rstd.dtype)
    normalised = h.to(rstd.dtype) * rstd.unsqueeze(-1)
    f = dy * weight
    total = (f - normalised * (f * normalised).mean(-1, keepdim=True)) * rstd.unsqueeze(-1)
    return total if dh is None else total + dh, (dy * normalised).reshape(-1, h.shape[-1]).sum(0).to(weight.dtype)


def _append(call: Forward, block: Tensor) -> None:
    """Writes a block behind those that count, where there is room."""
    (blocks,) = call.blocks
    if call.device_count is None:
        blocks[call.n_blocks].copy_(block)
        return
    here = torch.arange(len(blocks), device=block.device).view(-1, *(1,) * block.dim()) == call.device_count.clamp(min=0)
    blocks.copy_(torch.where(here, block.to(blocks.dtype), blocks))
