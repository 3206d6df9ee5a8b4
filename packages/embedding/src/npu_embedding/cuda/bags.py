"""Device code on CUDA of look-ups that sum, decode or normalise rows (bags), and of their backward: see both/bags.py.

A program takes bags one by one, BLOCK_N columns at a time; with NORM a block is a row.
"""

import triton
import triton.language as tl

from ..both.bags import spread_bag, sum_bag


@triton.jit(
    do_not_specialize=["n", "n_bags", "n_offsets", "n_each", "n_base", "first_row", "stop_row", "n_total", "i_padding"]
)
def sum_bags_kernel(
    p_index,  # [n]
    p_offsets,  # [n_offsets], n_bags or one more; None: n_each ids to a bag
    p_base,  # int64 [n_base]: the first rows of packed tables, which ids are of in turn; None: one table
    p_sample,  # [n]: weights of the ids; None: 1
    p_weight,  # [stop_row - first_row, N]
    p_steps,  # [stop_row - first_row]: factors of the rows; None: 1
    p_out,  # [n_bags, N]
    n,
    n_bags,
    n_offsets,
    n_each,
    n_base,
    first_row,
    stop_row,
    n_total,
    i_padding,
    s_weight,
    factor,
    eps,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FORMAT: tl.constexpr,  # "e4m3" or "e5m2": int8 that are the bits of such floats
    MEAN: tl.constexpr,
    NORM: tl.constexpr,
):
    """The sum of the rows of each bag, decoded, weighted and times a factor; MEAN: over the number of its ids."""
    n_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    for i_task in tl.range(tl.program_id(0), n_bags * n_blocks, tl.num_programs(0)):
        o_col = i_task % n_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
        # fmt: off
        sum_bag(
            p_index, p_offsets, p_base, p_sample, p_weight, p_steps, p_out, tl.cast(i_task // n_blocks, tl.int64), n,
            n_offsets, n_each, n_base, first_row, stop_row, n_total, i_padding, s_weight, factor, eps, o_col,
            N, BLOCK_N, FORMAT, MEAN, NORM,
        )
        # fmt: on


@triton.jit(do_not_specialize=["n", "n_bags", "n_offsets", "n_each", "n_base", "first_row", "stop_row", "i_padding"])
def spread_bags_kernel(
    p_dy,  # [n_bags, N]
    p_index,
    p_offsets,
    p_base,
    p_sample,
    p_weight,  # None: neither NORM, nor dsample, the gradient of the sample weights, is needed
    p_dx,  # [n, N]; None: not needed
    p_dsample,  # fp32 [blocks of columns, n]: parts of dsample; None: not needed
    n,
    n_bags,
    n_offsets,
    n_each,
    n_base,
    first_row,
    stop_row,
    i_padding,
    s_dy,
    s_weight,
    factor,
    eps,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MEAN: tl.constexpr,
    NORM: tl.constexpr,
):
    """dx of each position of a bag, and the gradient of its sample weight. Other arguments: those of `sum_bags_kernel`."""
    n_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    for i_task in tl.range(tl.program_id(0), n_bags * n_blocks, tl.num_programs(0)):
        i_block = i_task % n_blocks
        o_col = i_block * BLOCK_N + tl.arange(0, BLOCK_N)
        # fmt: off
        spread_bag(
            p_dy, p_index, p_offsets, p_base, p_sample, p_weight, p_dx, p_dsample, tl.cast(i_task // n_blocks, tl.int64), n,
            n_bags, n_offsets, n_each, n_base, first_row, stop_row, i_padding, s_dy, s_weight, factor, eps, i_block, o_col,
            N, BLOCK_N, MEAN, NORM,
        )
        # fmt: on
