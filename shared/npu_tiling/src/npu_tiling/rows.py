"""How the rows of tensors lie in memory: what lets a kernel follow a slice of a wider tensor without a copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from .budget import INT32_END

if TYPE_CHECKING:
    import torch


class RowLayout(NamedTuple):
    """Rows of several tensors of one shape, on two levels: `n_outer` groups of `n_inner` rows.

    Attributes:
        n_outer, n_inner: how many groups, and how many rows in each. Row-major order of the leading dimensions.
        strides: for each tensor the distance, in elements, from one group to the next and from one row to the next.
    """

    n_outer: int
    n_inner: int
    strides: tuple[tuple[int, int], ...]


def row_layout(*tensors: torch.Tensor) -> RowLayout | None:
    """The layout of the rows (the last dimension) of tensors that all have one shape.

    Returns:
        The layout; None where it takes more than two levels, where there are 2^31 rows or more on two levels, whose tiles
        kernels count in 32 bits, or where elements of a row are not next to each other: a copy (`contiguous()`) is needed
        then.
    """
    return layout_of(tensors[0].shape, [tensor.stride() for tensor in tensors])


def layout_of(
    shape: Sequence[int], strides: Sequence[Sequence[int]], certain: Callable[[Any], bool] = bool
) -> RowLayout | None:
    """`row_layout` of tensors of one shape and these strides. `certain`: `is_certain` where sizes may depend on data."""
    width = shape[-1]
    if all(is_contiguous(shape, own, certain) for own in strides):
        return RowLayout(1, prod(shape[:-1]), ((0, width),) * len(strides))
    if not (certain(width <= 1) or all(certain(own[-1] == 1) for own in strides)):
        return None
    levels: list[tuple[int, tuple[int, ...]]] = []  # outermost first: size, one stride a tensor
    for dimension, size in enumerate(shape[:-1]):
        if certain(size == 1):
            continue
        steps = tuple(own[dimension] for own in strides)
        if levels and all(certain(above == size * below) for above, below in zip(levels[-1][1], steps, strict=True)):
            levels[-1] = (levels[-1][0] * size, steps)
        else:
            levels.append((size, steps))
    if len(levels) > 2 or len(levels) == 2 and certain(levels[0][0] * levels[1][0] >= INT32_END):
        return None
    none = (1, (0,) * len(strides))
    outer, inner = [none, none, *levels][-2:]
    return RowLayout(outer[0], inner[0], tuple(zip(outer[1], inner[1], strict=True)))


def row_stride(shape: Sequence[int], strides: Sequence[int], certain: Callable[[Any], bool] = bool) -> int | None:
    """Elements from one row of a tensor to the next; None where rows do not follow one another at one stride."""
    layout = layout_of(shape, [strides], certain)
    return layout.strides[0][1] if layout is not None and layout.n_outer == 1 else None


def may_overlap(tensor: torch.Tensor, certain: Callable[[Any], bool] = bool) -> bool:
    """Whether two elements of a tensor may be one place in memory, as in an expanded one: nothing may be written to it."""
    if is_contiguous(tensor.shape, tensor.stride(), certain):
        return False
    dimensions: list[tuple[int, int]] = []  # by stride and size; torch.compile cannot sort sizes that it does not know
    for dimension in zip(tensor.stride(), tensor.shape, strict=True):
        place = 0
        while place < len(dimensions) and certain(dimensions[place][0] < dimension[0]):
            place += 1
        dimensions.insert(place, dimension)
    reached = 0
    for stride, size in dimensions:
        if not certain(size <= 1):
            if certain(stride <= reached):
                return not certain(tensor.numel() == 0)
            reached += (size - 1) * stride
    return False


def is_contiguous(shape: Sequence[int], strides: Sequence[int], certain: Callable[[Any], bool] = bool) -> bool:
    """As `Tensor.is_contiguous`: strides of dimensions of size 1 do not count, nor any where there are no elements."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if not (certain(size == 1) or certain(stride == expected)):
            return certain(prod(shape) == 0)
        expected *= size
    return True
