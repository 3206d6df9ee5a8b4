"""Passes over sources, of which reference.py composes every result, and the passes by PyTorch's own operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from .calls import Backward, Forward, Phase1, Phase1Backward


def flat(rows: Tensor) -> Tensor:
    """[..., D] as [T, D]."""
    return rows.reshape(-1, rows.shape[-1])


class Passes(Protocol):
    """Sums over N sources of T rows [D], each of which reads every source once.

    Attributes:
        dtype: of the arithmetic and of what is not rounded.
        width: D.
    """

    dtype: torch.dtype
    width: int

    def scores(self, g: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """s [N, T, S] and r [N, T] with g [S, D]."""

    def weighted_sum(self, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """[T, S, D] in `dtype`: the sum of the sources with weights [N, T, S]."""

    def products(self, do: Tensor) -> Tensor:
        """<do, v_i> [N, T, S] of do [T, S, D]."""

    def gradients(self, do: Tensor, g: Tensor, weights: Tensor, ds_rstd: Tensor, dv_coef: Tensor) -> Tensor:
        """Computes dv_i = sum over layers of (weight do + ds_rstd g) - dv_coef v_i for the sources that need it.

        do is [T, S, D], g [S, D], weights and ds_rstd [N, T, S], dv_coef [N, T].

        Returns:
            dg [S, D], the sum over sources and tokens of ds_rstd v_i.
        """

    def rstd(self, h: Tensor, eps: float) -> Tensor:
        """1 / rms(h) [T] of h [T, D]."""


class TorchPasses:
    """Passes by PyTorch's operators, in fp64 too, over the blocks and the prefix of a call.

    Attributes:
        dv: the gradient of each tensor of blocks, once `gradients` has computed it; None where it is not needed.
        dprefix_sum: the gradient of the prefix, with the call's dprefix added.
    """

    def __init__(self, call: Forward | Backward | Phase1 | Phase1Backward) -> None:
        sources: Sequence[Tensor] = call.blocks
        needed: Sequence[bool] = call.need_blocks if isinstance(call, (Backward, Phase1Backward)) else ()
        stacked, prefix, n_blocks, device_count = call.stacked, None, None, None
        if isinstance(call, (Forward, Backward)):
            prefix, device_count = call.prefix, call.device_count
            n_blocks = call.n_blocks if device_count is None else None
        self._sources, self._stacked, self._needed, self._prefix = sources, stacked, needed, prefix
        self._dprefix = flat(call.dprefix) if isinstance(call, Backward) and call.dprefix is not None else None
        self._rows = [flat(source) for source in (sources[0].unbind()[:n_blocks] if stacked else sources)]
        self._mask = (
            None if device_count is None else torch.arange(len(self._rows), device=device_count.device) < device_count
        )
        if self._mask is not None:  # what lies behind the last block may be anything
            self._rows = [torch.where(counts, row, 0.0) for counts, row in zip(self._mask, self._rows, strict=True)]
        self._need_rows = [needed[0]] * len(self._rows) if stacked and needed else list(needed)
        if prefix is not None:
            self._rows.append(flat(prefix))
            self._need_rows.append(isinstance(call, Backward) and call.need_prefix)
        like = self._rows[-1]
        self.width = like.shape[-1]
        self.dtype = torch.float64 if any(row.dtype == torch.float64 for row in self._rows) else torch.float32
        self.dv: list[Tensor | None] = []
        self.dprefix_sum: Tensor | None = None

    def scores(self, g: Tensor, eps: float) -> tuple[Tensor, Tensor]:
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
        total = weights.new_zeros((*weights.shape[1:], self.width))
        for row, weight in zip(self._rows, weights, strict=True):
            total += weight.unsqueeze(-1) * row.to(self.dtype).unsqueeze(1)
        return total.to(dtype)

    def products(self, do: Tensor) -> Tensor:
        do = do.to(self.dtype)
        return torch.stack([(do @ row.to(self.dtype).unsqueeze(-1)).squeeze(-1) for row in self._rows])

    def gradients(self, do: Tensor, g: Tensor, weights: Tensor, ds_rstd: Tensor, dv_coef: Tensor) -> Tensor:
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

    def rstd(self, h: Tensor, eps: float) -> Tensor:
        return torch.rsqrt(h.to(self.dtype).square().mean(-1) + eps)
