"""The gradients of x, weight and bias as they grow, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from . import matmul, parallel
from .chunks import Layout, part
from .launch.chunk import scale_rows
from .launch.target_rows import add_target_rows
from .rows import TargetGradients
from .tiling import Tiling


class Gradients(NamedTuple):
    """Gradients; None where not wanted. dweight is None too where it was added to weight_grad.

    Attributes:
        unfinished: [3], factors that the backward must still apply, beside the upstream gradient; None for 1.
    """

    dx: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None
    unfinished: Tensor | None

    def of(self, x: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The first three, the gradient of x in its shape [..., H]."""
        return self.dx if self.dx is None or x.dim() == 2 else self.dx.view(x.shape), self.dweight, self.dbias


#: Columns of x, and the weight [V, columns] that they are multiplied by; the last weight is the one that is trained.
Operands = tuple[tuple[slice, Tensor], ...]


def operands(weight: Tensor, frozen: Tensor | None) -> Operands:
    """The weight, and the frozen weight in front of it."""
    if frozen is None:
        return ((slice(0, weight.shape[1]), weight),)
    first = frozen.shape[1]
    return (slice(0, first), frozen.to(weight.dtype)), (slice(first, first + weight.shape[1]), weight)


class GradientSums:
    """The gradients of x, weight and bias as they grow, each in its final memory if its dtype allows.

    Attributes:
        targets: gradients at the targets, where E has zeros. dx gets them with each chunk, the weight's gradient at the end.
    """

    def __init__(self, x: Tensor, operands: Operands, tiling: Tiling, weight_grad: Tensor | None) -> None:
        """For x [N, H], of the operands' dtype; the last one's gradient is added to `weight_grad`, if there is one."""
        needs, parts = tiling.shape.needs, tiling.chunks
        columns, self._weight = operands[-1]
        self._operands, self._tiling, self._trained_x = operands, tiling, part(x, columns, 1)
        self._x, weight = x, self._weight
        self.targets: TargetGradients | None = None
        self.dx = allocate(x, x.shape, x.dtype) if needs.dx else None
        self._is_added = weight_grad is not None
        self.dweight = None
        if needs.dweight:
            self.dweight = allocate(x, weight.shape, tiling.sum_dtype) if weight_grad is None else weight_grad
        self._dbias = allocate(x, weight.shape[:1], tiling.exact) if needs.dbias else None
        self._wide_dx = None
        if needs.dx and parts.layout is Layout.COLUMNS and x.dtype != tiling.exact:
            self._wide_dx = allocate(x, (parts.longest[0], x.shape[1]), tiling.exact)

    def add(self, tokens: slice, columns: slice, gradient: Tensor) -> None:
        """Adds the products of the gradient [tokens, columns] of raw logits."""
        is_first, is_last = columns.start == 0, columns.stop == self._weight.shape[0]
        if self.dx is not None:
            dx = part(self.dx, tokens)
            total = dx if self._wide_dx is None else self._wide_dx[: dx.shape[0]]
            for where, weight in self._operands:
                multiply = matmul.product if is_first else matmul.add_product
                multiply(gradient, part(weight, columns), part(total, where, 1))
            if total is not dx and is_last:
                dx.copy_(total)
        if self.dweight is not None:
            add = self._add_to_dweight(tokens)
            add(gradient.t(), part(self._trained_x, tokens), part(self.dweight, columns), self._tiling.dweight_scale)
        if self._dbias is not None:
            if tokens.start == 0:
                torch.sum(gradient, 0, dtype=self._dbias.dtype, out=self._dbias[columns])
            else:
                self._dbias[columns] += gradient.sum(0, dtype=self._dbias.dtype)

    def allocate_targets(self, columns: Tensor, first: int) -> TargetGradients:
        """Allocates g; for the arguments see `TargetGradients`."""
        self.targets = TargetGradients(columns, first, allocate(self._x, columns.shape, torch.float32))
        return self.targets

    def add_scaled(self, tokens: slice, exponentials: Tensor, v: Tensor, sums: Tensor | None, scaled: Tensor | None) -> None:
        """Writes dx of some tokens, v (E W) + g W[target], and adds E^T (v x) to the weight's gradient.

        Args:
            sums: memory [tokens, H] for the sums of dx, None if they are in dx's dtype.
            scaled: memory [tokens, H] for v times x; may be that of `sums`.
        """
        x = part(self._x, tokens)
        if self.dx is not None:
            dx = part(self.dx, tokens)
            sums = dx if sums is None else sums
            matmul.product(exponentials, self._weight, sums)
            assert self.targets is not None
            scale_rows(sums, v, dx, self.targets.part(tokens), self._weight)
        if self.dweight is not None:
            assert scaled is not None
            scale_rows(x, v, scaled)
            add = self._add_to_dweight(tokens)
            add(exponentials.t(), scaled, self.dweight, self._tiling.dweight_scale)

    def _add_to_dweight(self, tokens: slice) -> Callable[[Tensor, Tensor, Tensor, float], None]:
        return matmul.product if tokens.start == 0 and not self._is_added else matmul.add_product

    def finished(self, unfinished: Tensor | None = None) -> Gradients:
        """Adds g x to the weight's gradient, and casts all; `unfinished`: factors that a backward must still apply."""
        if self.targets is not None and self.dweight is not None:
            add_target_rows(self.dweight, self._trained_x, self.targets)
        dweight, dbias, scale = None if self._is_added else self.dweight, self._dbias, self._tiling.dweight_scale
        if not self._tiling.chunks.tokens:
            for sums in (dweight, dbias):
                if sums is not None:
                    sums.zero_()
        shape = self._tiling.shape
        dx = None if self.dx is None else parallel.summed_dx(self.dx, shape.options)
        if dweight is not None and dweight.dtype != shape.weight_dtype:
            dweight = dweight.to(shape.weight_dtype)
        if dbias is not None:
            dbias = dbias if scale == 1.0 else dbias.mul_(scale)  # its sums are fp32 until here
            dbias = dbias.to(shape.bias_dtype or dbias.dtype)
        return Gradients(dx, dweight, dbias, unfinished)
