"""Passes over sources by kernels that take blocks of columns: for rows that do not fit on chip, and for several layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from npu_tiling import Device, LaunchSpec, launch_with_fallback
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from .. import tiling
from ..both.tiling import Tiling
from ..shape import Task
from .sources import Sources, follow
from .specs import KERNELS, launch_spec

_Arguments = tuple[int, tuple[Any, ...], tuple[int, ...]]  # grid, tensors, numbers


class KernelPasses:
    """The passes of `passes.Passes`; gradients are written where the sources say."""

    dtype = torch.float32

    def __init__(self, sources: Sources, device: Device, *, need_dg: bool = True) -> None:
        self._sources, self._device, self._need_dg = sources, device, need_dg
        self.width = sources.width
        self._tensors = sources.at[:2]
        self._strides = sources.s_block, sources.s_token

    def scores(self, g: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        g = g.contiguous()
        dot, square = self._products(g, (0, g.stride(0) if len(g) > 1 else 0), len(g), squares=True)
        assert square is not None
        rstd = torch.rsqrt(_added(square) / self.width + eps)
        return _added(dot) * rstd.unsqueeze(-1), rstd

    def rstd(self, h: Tensor, eps: float) -> Tensor:
        """By the kernel of `scores`, whose products are not used: PyTorch's sums of a row depend on the number of rows."""
        rows = KernelPasses(follow([h], self._device, stacked=False), self._device)
        return rows.scores(h[:1].to(self.dtype), eps)[1][0]

    def weighted_sum(self, weights: Tensor, dtype: torch.dtype) -> Tensor:
        n_layers, n_tokens = weights.shape[2], self._sources.n_tokens
        o = allocate(weights, (n_tokens, n_layers, self.width), dtype)
        tensors = (*self._tensors, weights.contiguous(), o)
        scalars = (self._sources.n_blocks, n_tokens, *self._strides)
        self._launch(Task.WEIGHTED_SUM, n_layers, lambda chosen: (chosen.grid(n_tokens), tensors, scalars))
        return o

    def products(self, do: Tensor) -> Tensor:
        return self._products(do, _row_strides(do), do.shape[1], squares=False)[0].sum(0)

    def gradients(self, do: Tensor, g: Tensor, weights: Tensor, ds_rstd: Tensor, dv_coef: Tensor) -> Tensor:
        """An empty tensor is returned where the caller does not need dg."""
        n_layers, n_tokens = len(g), self._sources.n_tokens
        dv, dv_table, aligned = self._sources.gradients_at[:3]
        rows = (g.contiguous(), weights.contiguous(), ds_rstd.contiguous(), dv_coef.contiguous())
        partials = None

        def arguments(chosen: Tiling) -> _Arguments:
            nonlocal partials
            splits = chosen.splits(n_tokens)
            partials = allocate(g, (splits, n_layers, self.width), torch.float32) if self._need_dg else None
            scalars = (self._sources.n_blocks, n_tokens, splits, *self._strides, *_row_strides(do))
            return splits * chosen.column_blocks, (*self._tensors, do, *rows, dv, dv_table, partials), scalars

        self._launch(Task.GRADIENT, n_layers, arguments, also_aligned=aligned)
        return torch.empty(0, device=g.device) if partials is None else partials.sum(0)

    def _products(
        self, a: Tensor, strides: tuple[int, int], n_layers: int, *, squares: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Partial sums, one for each block of columns, of <a, v_i> and, where asked for, <v_i, v_i>."""
        n_blocks, n_tokens = self._sources.n_blocks, self._sources.n_tokens
        dot, square = a, None

        def arguments(chosen: Tiling) -> _Arguments:
            nonlocal dot, square
            shape = (chosen.column_blocks, n_blocks, n_tokens)
            dot = allocate(a, (*shape, n_layers), torch.float32)
            square = allocate(a, shape, torch.float32) if squares else None
            return chosen.grid(n_tokens), (*self._tensors, a, dot, square), (n_blocks, n_tokens, *self._strides, *strides)

        self._launch(Task.PRODUCTS, n_layers, arguments)
        return dot, square

    def _launch(
        self, task: Task, n_layers: int, arguments: Callable[[Tiling], _Arguments], *, also_aligned: bool = True
    ) -> None:
        """Launches the kernel of a task with its grid and arguments for a tiling."""
        v = self._sources
        options = {"layers": n_layers, "row_stride": v.s_token, "aligned": v.at.aligned and also_aligned}
        spec = launch_spec(self._device, task, self.width, v.like.dtype, **options)
        assert spec is not None

        def run(spec: LaunchSpec) -> None:
            KERNELS.launch(spec.launch.kernel.module, spec.launch.kernel.name, spec, *arguments(spec.launch))

        launch_with_fallback(spec.launch.shape, spec, run, tiling.smaller)


def _row_strides(do: Tensor) -> tuple[int, int]:
    """Elements from one token, and from one row of a tile (a layer, or a token of one layer), to the next."""
    return do.stride(0), do.stride(1) if do.shape[1] > 1 else do.stride(0)


def _added(partials: Tensor) -> Tensor:
    """The sum of partial sums [n, ...] over n.

    The copy puts the partial sums of a token side by side. Then PyTorch adds them in one order for any number of tokens.
    """
    return partials.movedim(0, -1).contiguous().sum(-1)
