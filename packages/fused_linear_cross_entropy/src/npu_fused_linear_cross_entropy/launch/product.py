"""Launches of a product of x and the weight whose epilogue stores exp(z - k): no logit is in memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from npu_tiling import Device, LaunchSpec
from npu_tiling.chips.detection import dry_runs
from npu_tiling.launching.launcher import descriptor_type
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from ..chunks import part
from ..cuda.tiling import ProductLaunch, ReferencesLaunch, SumsLaunch
from ..options import Options
from .chunk import KERNELS

_MODULE = "cuda.product"
_ALIGNMENT = 16  # bytes, of addresses and strides that TMA takes


def is_possible(x: Tensor, weight: Tensor, weight_grad: Tensor | None, device: Device | None) -> bool:
    """Whether TMA can read x and the weight, and the installed Triton (3.4 and later) takes descriptors from the host.

    What is added to `weight_grad` for targets is added to rows whose columns are adjacent.
    """
    on_cuda = device is not None and device.kind == "cuda" and (weight_grad is None or weight_grad.stride(1) == 1)
    return on_cuda and all(map(_is_readable, (x, weight))) and (bool(dry_runs) or descriptor_type() is not None)


def _is_readable(matrix: Tensor) -> bool:
    pitch, step = matrix.stride()
    apart = step == 1 and pitch >= matrix.shape[1]  # TMA cannot address rows that overlap, as expanded ones do
    return apart and pitch * matrix.itemsize % _ALIGNMENT == 0 and matrix.data_ptr() % _ALIGNMENT == 0


class _Listed(NamedTuple):
    """Stands for a descriptor in dry runs without Triton."""

    base: Tensor
    block_shape: list[int]


def _described(matrix: Tensor, *block: int) -> Any:
    """A descriptor of blocks of a matrix."""
    kind = descriptor_type()
    return _Listed(matrix, [*block]) if kind is None else kind.from_tensor(matrix, [*block])


class ExponentialProduct:
    """E = exp(z - k) [rows, V] of z = logit_scale x w^T, and sums of E.

    Args:
        weight: [V, H].
        options: of the loss.
        device: whose kernels run.
    """

    def __init__(self, weight: Tensor, options: Options, device: Device) -> None:
        self._weight, self._options = weight, options
        self._launch = ProductLaunch(width=weight.shape[1], device=device)
        self._sums: Tensor | None = None

    def statistics(self, x: Tensor, target: Tensor, result: Tensor, parts: Sequence[tuple[slice, Tensor | None]]) -> Tensor:
        """Writes statistics [7, rows] and, given memory, exponentials.

        Args:
            x: [rows, H].
            target: int32 [rows], columns of the whole vocabulary.
            parts: slices of the weight's rows, which cover all of them, each with memory [rows, columns] for E or None.

        Returns:
            The final k [rows]: the target's logit (the first column's, where the target is elsewhere), or the row's
            maximum where that is larger by more than 60.
        """
        rows = x.shape[0]
        reference, top = allocate(x, (2, rows), torch.float32)
        target_logit, sums = allocate(x, (rows,), torch.float32), self._sums_of(x, parts)
        vocabulary, width = self._weight.shape
        tensors = (x, self._weight, target, reference, top, target_logit)
        sizes = (rows, x.stride(0), self._weight.stride(0), self._options.vocab_first, self._options.logit_scale)
        KERNELS.launch(_MODULE, "cross_entropy_references_kernel", _references(vocabulary, width), rows, tensors, sizes)
        products = [
            self._operands(x, columns, exponentials, reference, top, part_sums)
            for (columns, exponentials), part_sums in zip(parts, sums, strict=True)
        ]
        for kernel in ("cross_entropy_product_kernel", "cross_entropy_product_again_kernel"):
            for operands, (columns, _) in zip(products, parts, strict=True):
                self._multiply(kernel, operands, columns)
        spec, grid = _sums(), _sums().launch.grid(rows)
        assert self._sums is not None
        to_add, counts = (self._sums, top, target_logit, result), (rows, sum(map(len, sums)), result.stride(0))
        KERNELS.launch(_MODULE, "cross_entropy_product_sums_kernel", spec, grid, to_add, counts)
        return top

    def exponentials(self, x: Tensor, reference: Tensor, result: Tensor) -> None:
        """Writes E [rows, V], given the final k [rows]."""
        everything = slice(0, self._weight.shape[0])
        (sums,) = self._sums_of(x, ((everything, result),))
        operands = self._operands(x, everything, result, reference, reference.clone(), sums)
        self._multiply("cross_entropy_product_kernel", operands, everything)

    def release(self) -> None:
        """Gives memory back."""
        self._sums = None

    def _operands(
        self, x: Tensor, columns: slice, exponentials: Tensor | None, reference: Tensor, top: Tensor, sums: Tensor
    ) -> tuple[Any, ...]:
        """The tensors of a launch over some of the weight's rows."""
        block_m, block_n, block_h = self._launch.blocks
        return (
            reference,
            top,
            sums,
            _described(x, block_m, block_h),
            _described(part(self._weight, columns), block_n, block_h),
            None if exponentials is None else _described(exponentials, block_m, block_n // 2),
        )

    def _multiply(self, kernel: str, operands: tuple[Any, ...], columns: slice) -> None:
        scale, rows, width = self._options.logit_scale, operands[0].shape[0], columns.stop - columns.start
        spec = _product(self._launch, scale != 1.0, operands[-1] is not None)
        KERNELS.launch(_MODULE, kernel, spec, self._launch.grid(rows, width), operands, (rows, width, scale))

    def _sums_of(self, x: Tensor, parts: Sequence[tuple[slice, Tensor | None]]) -> tuple[Tensor, ...]:
        """Memory [tiles of columns, rows] for sums of each part."""
        tiles = [self._launch.column_tiles(columns.stop - columns.start) for columns, _ in parts]
        if self._sums is None or self._sums.shape != (sum(tiles), x.shape[0]):
            self._sums = allocate(x, (sum(tiles), x.shape[0]), torch.float32)
        return self._sums.split(tiles)


@functools.lru_cache(maxsize=64)
def _product(launch: ProductLaunch, scaled: bool, stores: bool) -> LaunchSpec:
    return LaunchSpec.of(launch, {"SCALED": scaled, "STORE": stores})


@functools.lru_cache(maxsize=64)
def _references(vocabulary: int, width: int) -> LaunchSpec:
    return LaunchSpec.of(ReferencesLaunch(vocabulary=vocabulary, width=width), {})


@functools.cache
def _sums() -> LaunchSpec:
    return LaunchSpec.of(SumsLaunch(), {})
