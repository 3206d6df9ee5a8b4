"""Passes over sources: what every result is composed of (reference.py), and how PyTorch's own operators make them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from npu_tiling.pytorch.tensors import statistics_dtype
from torch import Tensor


def flat(rows: Tensor) -> Tensor:
    """[..., D] as [T, D]."""
    return rows.reshape(-1, rows.shape[-1])


class Passes(Protocol):
    """Sums over N sources of T rows [D], each of which reads every source once.

    Attributes:
        dtype: of the arithmetic and of what is not rounded.
        device: where the sources are.
        width: D.
    """

    dtype: torch.dtype
    device: torch.device
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


class Rows:
    """Passes by PyTorch's operators, in fp64 too. `dv` is what `gradients` computed, None for sources that need none."""

    def __init__(self, sources: Sequence[Tensor], stacked: bool, needed: Sequence[bool] = ()) -> None:
        """For N tensors [..., D] or, `stacked`, one [N, ..., D]; `needed`: which of these tensors need a gradient."""
        self._sources, self._stacked, self._needed = sources, stacked, needed
        self._rows = [flat(source) for source in (sources[0].unbind() if stacked else sources)]
        self.device, self.width = sources[0].device, sources[0].shape[-1]
        self.dtype = statistics_dtype(sources[0].dtype)
        self.dv: list[Tensor | None] = []

    def scores(self, g: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        score, rstd = [], []
        for row in self._rows:
            wide = row.to(self.dtype)
            rstd.append(torch.rsqrt(wide.square().mean(-1) + eps))
            # A matrix product's sums of a row depend on how many rows there are; of one layer this costs little more.
            dot = (wide * g).sum(-1, keepdim=True) if len(g) == 1 else wide @ g.T
            score.append(dot * rstd[-1].unsqueeze(-1))
        return torch.stack(score), torch.stack(rstd)

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
        needed = [self._needed[0]] * len(self._rows) if self._stacked else self._needed
        dv: list[Tensor | None] = []
        for i, row in enumerate(self._rows):
            wide = row.to(self.dtype)
            dg = dg + ds_rstd[i].T @ wide  # not in place: under torch.func.vmap there may be several of it alone
            if not needed[i]:
                dv.append(None)
                continue
            gradient = (weights[i].unsqueeze(1) @ do).squeeze(1) + ds_rstd[i] @ g - dv_coef[i].unsqueeze(-1) * wide
            dv.append(gradient.to(row.dtype))
        if self._stacked and needed[0]:
            dv = [torch.stack([one for one in dv if one is not None])]
        self.dv = [None if one is None else one.view(v.shape) for one, v in zip(dv, self._sources, strict=False)]
        return dg

    def rstd(self, h: Tensor, eps: float) -> Tensor:
        return torch.rsqrt(h.to(self.dtype).square().mean(-1) + eps)
