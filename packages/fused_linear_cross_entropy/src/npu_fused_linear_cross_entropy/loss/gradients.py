"""Kernels that end gradients: they multiply by numbers, and add the targets' part of the weight's gradient.

For each token t, dW[target[t]] += g[t] x[t]; g: see formula.py. First a sort by rank: each token's target is compared with
all others, and its place is the number of tokens before it. The T^2 compares cost little beside the products with the
weight. Then one program sums each run of equal targets, in fp32. There rows are tokens, and columns are targets, counted
from the first row of the weight.
"""

from __future__ import annotations

from typing import Any

from npu_tiling import Device
from npu_tiling.budget import here
from npu_tiling.calls import Empty
from npu_tiling.device import load_block, places_below, store_block, tl, triton
from npu_tiling.launch import CountTiling
from npu_tiling.plans import Plan

from ..call import INT32, Scale
from ..decide import exactly
from ..head import part, row
from ..tiling import row_block
from . import TargetGradients


@triton.jit(do_not_specialize=["n"])
def cross_entropy_scale_kernel(
    p_values,  # [n]
    p_factor,  # one number
    p_out,  # [n], or None: in place
    n,
    BLOCK_N: tl.constexpr,
):
    """out = factor * values. In place, where the factor is 1, no value is read or written."""
    factor = tl.load(p_factor).to(tl.float32)
    n_changed, p_to = n, p_out
    if p_out is None:
        n_changed, p_to = tl.where(factor == 1.0, 0, n), p_values
    o_lane = tl.arange(0, BLOCK_N)
    for i_block in tl.range(tl.program_id(0), tl.cdiv(n_changed, BLOCK_N), tl.num_programs(0)):
        i_first = i_block.to(tl.int64) * BLOCK_N
        m_block = o_lane < n - i_first
        b_block = tl.load(p_values + i_first + o_lane, mask=m_block, other=0.0).to(tl.float32) * factor
        tl.store(p_to + i_first + o_lane, b_block.to(p_values.dtype.element_ty), mask=m_block)


@triton.jit(do_not_specialize=["n_rows", "first"])
def cross_entropy_scale_rows_kernel(
    p_values,  # [rows, N]
    p_factors,  # fp32 [rows]
    p_out,  # [rows, N], the values' memory or another
    p_gradient,  # fp32 [rows]: g; None: nothing is added
    p_target,  # int32 [rows]
    p_weight,  # [V, N]
    n_rows, s_values, s_out,
    first,  # the column of the vocabulary that the weight's first row is
    s_weight, s_weight_column,
    N: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out = factor values + g W[target], in fp32 and rounded once."""
    # lint: allow fill-in-loop: the end of a row that is no whole block
    o_lane = tl.arange(0, BLOCK_N)
    for i_row in tl.range(tl.program_id(0), n_rows, tl.num_programs(0)):
        factor = tl.load(p_factors + i_row)
        p_from, p_to = p_values + i_row.to(tl.int64) * s_values, p_out + i_row.to(tl.int64) * s_out
        g, p_row = 0.0, p_weight
        if p_gradient is not None:
            g = tl.load(p_gradient + i_row)
            row = tl.where(g == 0.0, 0, tl.load(p_target + i_row) - first)  # g is 0 where the target is not one of these
            p_row = p_weight + row.to(tl.int64) * s_weight
        for i_col in tl.range(0, N, BLOCK_N):
            o_col = i_col + o_lane
            m_col = places_below(o_col, N, N % BLOCK_N == 0)
            b_value = load_block(p_from + o_col, m_col).to(tl.float32) * factor
            if p_gradient is not None:
                p_block = p_row + i_col.to(tl.int64) * s_weight_column  # of a transposed weight: V apart
                b_value += load_block(p_block + o_lane * s_weight_column, m_col).to(tl.float32) * g
            store_block(p_to + o_col, b_value, m_col)


@triton.jit
def columns_of_targets(p_target, o_row, n_rows, first, N: tl.constexpr):
    """Targets as fp32 columns; N where a target is none of the weight's rows, and past the last token."""
    b_column = (tl.load(p_target + o_row, mask=o_row < n_rows, other=-1) - first).to(tl.float32)
    return tl.where((b_column >= 0.0) & (b_column < N), b_column, N)


@triton.jit(do_not_specialize=["n_rows", "first"])
def cross_entropy_order_kernel(
    p_target,  # int32 [rows], negative: none
    p_order,  # int32 [rows]: tokens, stably sorted by target; those without one last
    p_runs,  # int32 [rows]: at the start of a run of equal targets its length, 0 elsewhere
    n_rows,  # at most 2^24: places are counted in fp32
    first,  # the column of the vocabulary that column 0 is
    N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sorts tokens by target."""
    # lint: allow short-transfer: a target is four bytes, and is compared with a tile of others
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, BLOCK_M), tl.num_programs(0)):
        o_row = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        m_row = o_row < n_rows
        b_column = columns_of_targets(p_target, o_row, n_rows, first, N)
        b_lower = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        b_equal = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        b_earlier = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for i_other in tl.range(0, n_rows, BLOCK_N):
            o_other = i_other + tl.arange(0, BLOCK_N)
            b_other = columns_of_targets(p_target, o_other, n_rows, first, N)
            b_difference = b_other[None, :] - b_column[:, None]
            b_distance = o_other.to(tl.float32)[None, :] - o_row.to(tl.float32)[:, None]
            b_same = tl.where(b_difference == 0.0, 1.0, 0.0)
            b_lower += tl.where(b_difference < 0.0, 1.0, 0.0)
            b_equal += b_same
            b_earlier += tl.where(b_distance < 0.0, b_same, 0.0)
        b_before = tl.sum(b_earlier.to(tl.int32), axis=1)
        b_place = tl.sum(b_lower.to(tl.int32), axis=1) + b_before
        m_first = (b_column < N) & (b_before.to(tl.float32) == 0.0)
        b_run = tl.where(m_first, tl.sum(b_equal.to(tl.int32), axis=1), 0)
        tl.store(p_order + b_place, o_row, mask=m_row)
        tl.store(p_runs + b_place, b_run, mask=m_row)


@triton.jit(do_not_specialize=["n_rows", "first"])
def cross_entropy_target_rows_kernel(
    p_x,  # [rows, H]
    p_gradient,  # fp32 [rows]: g
    p_target,  # int32 [rows]
    p_order,  # these two by the kernel above
    p_runs,
    p_dweight,  # [N, H], added to
    n_rows, s_x, s_dweight, first,
    H: tl.constexpr, BLOCK_H: tl.constexpr,
    AT_ONCE: tl.constexpr,  # rows that are loaded together
):  # fmt: skip
    """Adds g x to the rows of targets. One program takes a run: its sum is fp32, in the order of tokens, rounded once."""
    for i_place in tl.range(tl.program_id(0), n_rows, tl.num_programs(0)):
        n_run = tl.load(p_runs + i_place)
        if n_run > 0:
            column = tl.load(p_target + tl.load(p_order + i_place)) - first
            p_row = p_dweight + column.to(tl.int64) * s_dweight
            for i_h in tl.range(0, H, BLOCK_H):
                o_h = i_h + tl.arange(0, BLOCK_H)
                m_h = o_h < H
                b_sum = tl.load(p_row + o_h, mask=m_h, other=0.0).to(tl.float32)
                for i_run in tl.range(0, n_run, AT_ONCE):
                    for i_next in tl.static_range(AT_ONCE):
                        i_place_of_row = i_place + tl.minimum(i_run + i_next, n_run - 1)
                        i_row = tl.load(p_order + i_place_of_row)
                        m_x = m_h
                        if AT_ONCE > 1:
                            m_x = m_h & (i_run + i_next < n_run)
                        b_x = tl.load(p_x + i_row.to(tl.int64) * s_x + o_h, mask=m_x, other=0.0).to(tl.float32)
                        b_sum += b_x * tl.load(p_gradient + i_row)
                tl.store(p_row + o_h, b_sum.to(p_dweight.dtype.element_ty), mask=m_h)


# Tiles.

_SCALED_COLUMNS = {"cuda": 2048, "ascend": 8192}  # 4 and 16 KB of bf16
_SCALED_BYTES = 16 * 1024  # of a block on Ascend: see tiling.py
_SCALED_VALUES = 4096  # of a block on CUDA
_PROGRAMS = {"cuda": 8, "ascend": 1}  # that scale values, of a core
_ORDER_ROWS, _ORDER_COLUMNS = 32, 128  # 16 KB of fp32, a handful of which are on chip
_COLUMNS = {"cuda": 1024, "ascend": 8192}
_AT_ONCE = {"cuda": 4, "ascend": 1}  # rows of x: on CUDA loads wait for one another less


def scale_tiling(itemsize: int, device: Device) -> CountTiling:
    """That of values of `itemsize` bytes, which are multiplied by one number."""
    block = _SCALED_VALUES if device.kind == "cuda" else _SCALED_BYTES // itemsize
    why, per_core = "programs stride over blocks of values", _PROGRAMS[device.kind]
    return CountTiling(
        device=device, blocks=(("BLOCK_N", block),), per_program=block, per_core=per_core, why=why, decided_at=here()
    )


# Launches.

_TOKENS = 8192  # that are sorted together: compares grow with its square, roundings of dW with the number of groups


def scale_(p: Plan, call: Scale) -> tuple[()]:
    """The plan of a gradient times one number, in place; where that is 1, nothing is read or written."""
    gradient: Any = call.gradient
    assert gradient.is_contiguous()
    _scale(p, gradient, reads={"p_factor": call.factor}, writes={"p_values": gradient, "p_out": None})
    return ()


def scale(p: Plan, call: Scale) -> tuple[Any]:
    """The plan of a gradient times one number, in new memory."""
    gradient, out = p.contiguous(call.gradient), p.new(call.results()["scaled"])
    _scale(p, gradient, reads={"p_values": gradient, "p_factor": call.factor}, writes={"p_out": out})
    return (out,)


def _scale(p: Plan, gradient: Any, *, reads: dict[str, Any], writes: dict[str, Any]) -> None:
    if n := gradient.numel():
        tiling = scale_tiling(gradient.dtype.itemsize, p.chip)
        p.launch_over(cross_entropy_scale_kernel, tiling, n, reads=reads, writes=writes, sizes={"n": n})


def scale_rows(
    p: Plan, values: Any, factors: Any, out: Any, targets: TargetGradients | None = None, weight: Any = None
) -> None:
    """out = factors [rows] values [rows, N] + g W[target], W the weight [V, N]; without targets the product alone.

    out may be the values. torch.mul is slow where dtypes differ.
    """
    rows, width = values.shape
    if not rows:
        return
    added = {"p_gradient": None, "p_target": None, "p_weight": None}
    place = {"first": 0, "s_weight": 0, "s_weight_column": 1}
    if targets is not None:
        added = {"p_gradient": targets.values, "p_target": targets.columns, "p_weight": weight}
        place = {"first": targets.first, "s_weight": weight.strides[0], "s_weight_column": weight.strides[1]}
    blocks, why = (("N", width), ("BLOCK_N", row_block(width, _SCALED_COLUMNS, p.chip))), "a program takes a row at a time"
    p.launch_over(
        cross_entropy_scale_rows_kernel,
        CountTiling(device=p.chip, blocks=blocks, why=why, decided_at=here()),
        rows,
        reads={"p_values": values, "p_factors": factors, **added},
        writes={"p_out": out},
        sizes={"n_rows": rows, "s_values": values.strides[0], "s_out": out.strides[0], **place},
    )


def add_target_rows(p: Plan, dweight: Any, x: Any, targets: TargetGradients) -> None:
    """dweight[target[t]] += g[t] x[t], in place and in the order of tokens; dweight [V, H], x [tokens, H]."""
    for tokens in exactly(x.shape[0], _TOKENS):
        _add_target_rows(p, dweight, part(p, x, tokens), targets.part(p, tokens))


def _add_target_rows(p: Plan, dweight: Any, x: Any, targets: TargetGradients) -> None:
    rows, width = x.shape
    both = p.new(Empty((2, rows), INT32))
    order, runs = row(p, both, 0), row(p, both, 1)
    blocks = ("N", dweight.shape[0]), ("BLOCK_M", _ORDER_ROWS), ("BLOCK_N", _ORDER_COLUMNS)
    why = "rows are sorted by target, a tile of them a program at a time"
    sorting = CountTiling(device=p.chip, blocks=blocks, per_program=_ORDER_ROWS, why=why, decided_at=here())
    sizes = {"n_rows": rows, "first": targets.first}
    reads, writes = {"p_target": targets.columns}, {"p_order": order, "p_runs": runs}
    p.launch_over(cross_entropy_order_kernel, sorting, rows, reads=reads, writes=writes, sizes=sizes)
    why = "a program takes a row of the weight's gradient at a time"
    blocks = ("H", width), ("BLOCK_H", row_block(width, _COLUMNS, p.chip)), ("AT_ONCE", _AT_ONCE[p.chip.kind])
    p.launch_over(
        cross_entropy_target_rows_kernel,
        CountTiling(device=p.chip, blocks=blocks, why=why, decided_at=here()),
        rows,
        reads={"p_x": x, "p_gradient": targets.values, **reads, **writes},
        writes={"p_dweight": dweight},
        sizes={**sizes, "s_x": x.strides[0], "s_dweight": dweight.strides[0]},
    )
