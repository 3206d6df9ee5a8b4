"""What a tiling depends on: sizes, strides, dtypes and options. No tensors."""

from __future__ import annotations

from dataclasses import dataclass

from npu_tiling.budget import INT32_END

from .call import To, casting

MAX_COUNTED_ROWS = 2**30  # kernels number the rows of several groups in 32 bits


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """A casting mode with the dtypes of a call: "bf16", "fp16" or, where a value is not rounded, "fp32".

    Attributes:
        normalised, factors, weighted: as `call.Casting` has them.
    """

    normalised: str = "fp32"
    factors: str = "fp32"
    weighted: str = "fp32"

    @classmethod
    def of(cls, casting_mode: str, x: str, weight: str | None) -> Rounding:
        """For a mode, x's dtype and the weight's dtype (None: there is no weight)."""
        mode = casting(casting_mode)
        dtypes = {To.FP32: "fp32", To.X: x, To.WEIGHT: weight or "fp32"}
        weighted = "fp32" if weight is None else dtypes[mode.weighted]
        return cls(normalised=dtypes[mode.normalised], factors=dtypes[mode.factors], weighted=weighted)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One forward or one backward: all that a tiling depends on, besides the chip.

    Attributes:
        backward: whether it is a backward.
        n_outer, n_inner: rows on two levels, as `npu_tiling.RowLayout` has them: groups, and rows of a group.
        width: elements of a row.
        outer_stride, inner_stride: the largest distance, in elements, between two groups and between two rows of a group.
        itemsizes: bytes of an element of each tensor whose rows are read; if there is a gate, it is the last.
        narrow: one of these tensors, or the result, has a dtype narrower than fp32.
        rounding: what is rounded on the way.
        activation: of the gate, "silu" or "sigmoid"; "": there is no gate.
        gate_first: the gate multiplies x, and not the result.
        second_output: a forward stores y in another dtype than x's, or in fp32 too.
        per_head: each group is the rows of one head, which has parameters of its own.
        biased: a bias is added.
        quantised: the result has one byte an element, and a scale a row.
        with_rows: y or dx is written.
    """

    backward: bool
    n_outer: int
    n_inner: int
    width: int
    outer_stride: int = 0
    inner_stride: int = 0
    itemsizes: tuple[int, ...]
    narrow: bool
    rounding: Rounding
    activation: str = ""
    gate_first: bool = False
    second_output: bool = False
    per_head: bool = False
    biased: bool = False
    quantised: bool = False
    with_rows: bool = True

    @property
    def gated(self) -> bool:
        return bool(self.activation)

    @property
    def residual_itemsize(self) -> int:
        """Bytes of an element of the residual that a forward reads; 0: there is none."""
        rows = self.itemsizes[:-1] if self.gated else self.itemsizes
        return 0 if self.backward or len(rows) < 2 else rows[1]

    @property
    def itemsizes_but_second(self) -> tuple[int, ...]:
        """`itemsizes` without that of a residual that a forward reads, or of the gradient of a sum that a backward adds."""
        rows = self.itemsizes[:-1] if self.gated else self.itemsizes
        return self.itemsizes[:1] + self.itemsizes[2:] if len(rows) > 1 + self.backward else self.itemsizes

    @property
    def max_rows(self) -> int:
        """Rows of one group that one tile may have: offsets inside a tile are 32-bit."""
        addressable = max(1, (INT32_END - self.width) // max(self.inner_stride, self.width, 1))
        return min(addressable, self.n_inner) if self.n_outer > 1 else addressable

    @property
    def max_groups(self) -> int:
        """Groups that one tile may have: offsets inside a tile are 32-bit."""
        return INT32_END // max(self.outer_stride + self.inner_stride * self.n_inner, 1)

    @property
    def order(self) -> str:
        """How kernels whose tiles are single rows number them: ORDER of wide.py."""
        return "heads" if self.per_head else "one" if self.n_outer == 1 else "groups"

    @property
    def rounding_constants(self) -> dict[str, object]:
        """`tl.constexpr` parameters of kernels that normalise."""
        return {"NORMALISED": self.rounding.normalised, "FACTORS": self.rounding.factors}

    @property
    def formula_constants(self) -> dict[str, object]:
        """`tl.constexpr` parameters of kernels with a gate and a bias."""
        gate = {"ACTIVATION": self.activation, "GATE_FIRST": self.gate_first}
        return {**self.rounding_constants, "WEIGHTED": self.rounding.weighted, **gate}
