"""What a launch is for."""

from __future__ import annotations

from dataclasses import dataclass

from npu_tiling.budget.arithmetic import INT32_END


@dataclass(frozen=True)
class Problem:
    """What a launch is for.

    Attributes:
        n_outer, n_inner: rows on two levels, as `npu_tiling.RowLayout` has them.
        width: elements of a row.
        inner_stride, outer_stride: the largest distance, in elements, between two rows of a group, and between two groups,
            in any tensor.
        itemsizes: bytes of an element, for each tensor of rows that is read.
        narrow_output: the result is narrower than fp32, so that its fp32 tile is cast before it is stored.
        rounded_factors: rstd and the scale are rounded to a narrower dtype before they are used.
        gated: the last of the tensors of rows that are read is a gate.
        second_output: the result is stored in another dtype than x's, or in fp32 too.
        per_head: each group is the rows of one head, which has a weight of its own: a program takes rows of one head.
        biased: a bias is added.
        quantised: the result has one byte an element, and a scale a row.
        rounded: what a bias meets is rounded to a narrower dtype.
        with_rows: rows are written, and not the gradient of the weight alone.
    """

    n_outer: int
    n_inner: int
    width: int
    inner_stride: int
    outer_stride: int
    itemsizes: tuple[int, ...]
    narrow_output: bool
    rounded_factors: bool = False
    gated: bool = False
    second_output: bool = False
    per_head: bool = False
    biased: bool = False
    quantised: bool = False
    rounded: bool = False
    with_rows: bool = True

    @property
    def added(self) -> bool:
        """Whether a forward reads a residual."""
        return len(self.itemsizes) - self.gated > 1

    @property
    def max_rows(self) -> int:
        """Rows of one group that one tile may have: offsets inside a tile are 32-bit."""
        addressable = max(1, (INT32_END - self.width) // max(self.inner_stride, self.width, 1))
        return min(addressable, self.n_inner) if self.n_outer > 1 else addressable

    @property
    def max_groups(self) -> int:
        """Groups that one tile may have, for the same reason."""
        return INT32_END // max(self.outer_stride + self.inner_stride * self.n_inner, 1)
