"""The records of the operators, the table of casting modes, what tilings depend on of a call (`Shape`), and what
tilings of both chips have (`RowTiling`).

A record has the arguments and the results of a direction. From it npu_tiling/calls.py derives the operator's schema, its
fake function and the key of its plans.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch
from npu_tiling import Device
from npu_tiling.budget import INT32_END
from npu_tiling.calls import Empty, statistics_dtype
from npu_tiling.launch import Tiling
from torch import Tensor

# Casting modes: what is rounded on the way, and to which dtype. reference.py and `Rounding` below read this table, and
# from `Rounding` tilings and kernels have their constants.
#
# A new mode that rounds what the columns of `Casting` name is a row of `CASTING_MODES`, and
#
#     its name in the docstrings of reference.py, of `rms_norm` and `gated_rms_norm` (api.py) and of `RMSNorm` (module.py),
#     in the README, and in the `Literal` of explain.py's option
#     its formula in tests/test_reference.py; the number of its roundings in `check` of tests/formula.py; what it rounds in
#     tests/test_final.py (`test_final_modules_round_where_the_mode_says`); the lists of modes in other tests and in
#     tools/cuda_calls/rms_norm.py (`git grep -n '"gemma"'` finds them); and the lists of calls that have a row for each
#     mode, tests/ascend_calls.py; what `hatch run api rms_norm` writes; how many classes `patch` replaces, in the README
#
# A mode that rounds something else needs a new column as well: here, in `Rounding` and in the constants of `Shape`, where
# reference.py (`_round`) and formula.py (`round_to`) round, in the signature and the calls of every kernel of this package
# that `git grep -w FACTORS` finds, in `NAMES` of explain.py, and in both chips' tilings, which read `shape.rounding`.


class To(Enum):
    """The dtype that a value is rounded to. Arithmetic goes on in fp32 with the rounded value."""

    FP32 = "not rounded"
    X = "x's dtype"
    WEIGHT = "the weight's dtype"


@dataclass(frozen=True, kw_only=True)
class Casting:
    """A casting mode.

    Attributes:
        normalised: what n = x rstd is rounded to.
        factors: what rstd, offset + weight and the bias are rounded to, all three alike: a mode that rounds the weight alone
            needs a column of its own.
        weighted: what n (offset + weight) is rounded to before a bias is added or a gate multiplies it. Without a weight
            nothing is rounded here.
    """

    normalised: To
    factors: To
    weighted: To


CASTING_MODES = {
    "llama": Casting(normalised=To.X, factors=To.FP32, weighted=To.WEIGHT),  # Hugging Face's Llama
    "gemma": Casting(normalised=To.FP32, factors=To.FP32, weighted=To.FP32),
    "none": Casting(normalised=To.X, factors=To.X, weighted=To.X),
}


def casting(mode: str) -> Casting:
    """The row of a mode.

    Raises:
        ValueError: there is no such mode.
    """
    if mode not in CASTING_MODES:
        raise ValueError(f"casting_mode is {mode!r} and must be one of {', '.join(map(repr, CASTING_MODES))}.")
    return CASTING_MODES[mode]


class Forward(NamedTuple):
    """y = norm(x + residual) * (offset + weight) + bias, gated or quantised.

    Attributes:
        x: [..., D].
        residual: is added to x; None: there is no residual.
        gate: act(gate) multiplies the result or, where norm_before_gate is False, x; None: there is no gate.
        weight, bias: [D] or [H, D].
        eps, offset, casting_mode, activation, norm_before_gate, in_place: as the public functions have them.
        dtype: of y. A dtype of one byte: y is quantised.
        return_fp32: whether y in fp32 is a result too.
        save_rstd: whether rstd is a result too, for a backward.
    """

    x: Tensor
    residual: Tensor | None = None
    gate: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 1e-6
    offset: float = 0.0
    casting_mode: str = "llama"
    activation: str = "silu"
    norm_before_gate: bool = True
    in_place: bool = False
    dtype: torch.dtype = torch.float32
    return_fp32: bool = False
    save_rstd: bool = False

    def has_heads(self) -> bool:
        """Whether each head has parameters of its own."""
        return has_heads(self.weight, self.bias)

    def results(self) -> dict[str, Empty | None]:
        """y, the sum, y in fp32, rstd and the scales of a quantised y; None for what is not asked for."""
        x, total = self.x, self.x if self.residual is None else self.residual
        statistics = statistics_dtype(total.dtype)
        return {
            "y": Empty(x.shape, self.dtype),
            "sum": None if self.residual is None else Empty(x.shape, total.dtype),
            "fp32": Empty(x.shape, statistics) if self.return_fp32 else None,
            "rstd": Empty(x.shape[:-1], statistics, last_outermost=self.has_heads()) if self.save_rstd else None,
            "scale": Empty(x.shape[:-1], torch.float32) if self.dtype.itemsize == 1 else None,
        }


class Backward(NamedTuple):
    """dx = rstd (g - n mean(g n)) + dsum, with g = dy (offset + weight) and n = x rstd.

    Attributes:
        dy: the gradient of y.
        dsum: the gradient of the forward's sum, which is added to dx; None: there is none.
        x: the forward's x or, with a residual, its sum.
        gate, weight, bias, offset, casting_mode, activation, norm_before_gate: the forward's.
        rstd: [...], from the forward.
        rounded_to: the dtype of the forward's x, which `To.X` stands for: a sum may be wider.
        need_dx, need_dgate, need_dweight, need_dbias: the gradients that are asked for.
    """

    dy: Tensor
    dsum: Tensor | None
    x: Tensor
    gate: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    rstd: Tensor
    offset: float
    casting_mode: str
    activation: str
    norm_before_gate: bool
    rounded_to: torch.dtype
    need_dx: bool
    need_dgate: bool
    need_dweight: bool
    need_dbias: bool

    def has_heads(self) -> bool:
        """Whether each head has parameters of its own."""
        return has_heads(self.weight, self.bias)

    def results(self) -> dict[str, Empty | None]:
        """dx, dgate, dweight and dbias; None for what is not asked for."""
        return {
            "dx": _gradient(self.x, self.need_dx),
            "dgate": _gradient(self.gate, self.need_dgate),
            "dweight": _gradient(self.weight, self.need_dweight),
            "dbias": _gradient(self.bias, self.need_dbias),
        }


class QK(NamedTuple):
    """The norms of q and k of a fused projection.

    Attributes:
        qkv: [..., (n_heads + 2 n_kv_heads) D].
        q_weight, k_weight, n_heads, n_kv_heads, eps, offset, casting_mode: as `qk_rms_norm` has them.
        save_rstd: whether rstd of q and of k are results too, for a backward.
    """

    qkv: Tensor
    q_weight: Tensor | None
    k_weight: Tensor | None
    n_heads: int
    n_kv_heads: int
    eps: float
    offset: float
    casting_mode: str
    save_rstd: bool

    def norm(self, x: Tensor, weight: Tensor | None) -> Forward:
        """The record of one norm. x: rows that are normalised."""
        options = (self.eps, self.offset, self.casting_mode)
        return Forward(x, None, None, weight, None, *options, dtype=x.dtype, save_rstd=self.save_rstd)

    def results(self) -> dict[str, Empty | None]:
        """q and k, [..., heads, D], and rstd of both: a number for each head or, where all heads are one row, each token."""
        (*leading, width), heads = self.qkv.shape, (self.n_heads, self.n_kv_heads)
        own = width // (self.n_heads + 2 * self.n_kv_heads)
        statistics = statistics_dtype(self.qkv.dtype)
        one_row = [weight is not None and weight.shape[0] != own for weight in (self.q_weight, self.k_weight)]
        rstd = [Empty((*leading,) if all_ else (*leading, n), statistics) for all_, n in zip(one_row, heads, strict=True)]
        q, k = (Empty((*leading, n, own), self.qkv.dtype) for n in heads)
        q_rstd, k_rstd = rstd if self.save_rstd else (None, None)
        return {"q": q, "k": k, "q_rstd": q_rstd, "k_rstd": k_rstd}


class QKBackward(NamedTuple):
    """The gradient of a fused projection, from those of q, k and v.

    Attributes:
        dq, dk, dv: [..., heads, D]; None: no gradient reached that part.
        qkv, q_weight, k_weight, n_heads, n_kv_heads, offset, casting_mode: the forward's.
        q_rstd, k_rstd: from the forward.
        need_dqkv, need_dq_weight, need_dk_weight: the gradients that are asked for.
    """

    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    qkv: Tensor
    q_weight: Tensor | None
    k_weight: Tensor | None
    q_rstd: Tensor
    k_rstd: Tensor
    n_heads: int
    n_kv_heads: int
    offset: float
    casting_mode: str
    need_dqkv: bool
    need_dq_weight: bool
    need_dk_weight: bool

    def norm(self, dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, need_dweight: bool) -> Backward:
        """The record of one norm's backward. dy and x: rows that are normalised."""
        return Backward(
            dy=dy,
            dsum=None,
            x=x,
            gate=None,
            weight=weight,
            bias=None,
            rstd=rstd,
            offset=self.offset,
            casting_mode=self.casting_mode,
            activation="silu",
            norm_before_gate=True,
            rounded_to=x.dtype,
            need_dx=self.need_dqkv,
            need_dgate=False,
            need_dweight=need_dweight,
            need_dbias=False,
        )

    def results(self) -> dict[str, Empty | None]:
        """The gradients of the projection and of both weights; None for what is not asked for."""
        return {
            "dqkv": _gradient(self.qkv, self.need_dqkv),
            "dq_weight": _gradient(self.q_weight, self.need_dq_weight and self.dq is not None),
            "dk_weight": _gradient(self.k_weight, self.need_dk_weight and self.dk is not None),
        }


def has_heads(weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether each head has parameters of its own."""
    return (weight is not None and weight.dim() == 2) or (bias is not None and bias.dim() == 2)


def _gradient(of: Tensor | None, needed: bool) -> Empty | None:
    return Empty(of.shape, of.dtype) if needed and of is not None else None


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
        return 0 if self.backward or self.gated or len(self.itemsizes) < 2 else self.itemsizes[1]

    @property
    def itemsizes_without_addend(self) -> tuple[int, ...]:
        """`itemsizes` without the second, where it is a residual (forward) or dsum (backward), which no gate goes with."""
        has_addend = not self.gated and len(self.itemsizes) == (3 if self.backward else 2)
        return self.itemsizes[:1] + self.itemsizes[2:] if has_addend else self.itemsizes

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
    def formula_constants(self) -> dict[str, object]:
        """`tl.constexpr` parameters of formulas."""
        rounding = {"NORMALISED": self.rounding.normalised, "FACTORS": self.rounding.factors}
        gate = {"ACTIVATION": self.activation, "GATE_FIRST": self.gate_first}
        return {**rounding, "WEIGHTED": self.rounding.weighted, **gate}


@dataclass(frozen=True, kw_only=True)
class RowTiling(Tiling):
    """How one direction runs on a chip.

    Attributes:
        shape, device: what it was made for.
        rule: the row of the chip's table.
        rows, columns: of a tile; of kernels that take blocks of columns, of a block.
    """

    shape: Shape
    device: Device = field(repr=False)
    rule: Any
    rows: int = 1
    columns: int

    @property
    def kernel(self) -> str:
        """ "rows", "wide" or "shared", as the tables have them."""
        kernel: str = self.rule.kernel
        return kernel

    @property
    def why(self) -> str:
        return str(self.rule.why)

    @property
    def decided_at(self) -> str:
        return str(self.rule.decided_at)

    @property
    def column_blocks(self) -> int:
        return -(-self.shape.width // self.columns)
