"""Device code of a sparse gradient on Ascend: where the indices of each row lie among all that are sorted."""

import triton
import triton.language as tl


@triton.jit
def first_not_below(p_sorted, key, i_first, i_stop, n_steps):
    """The first position from `i_first` to before `i_stop` where `p_sorted` is not below `key`; `i_stop` if it always is."""
    for _ in tl.range(0, n_steps):
        i_half = (i_first + i_stop) // 2
        below = (tl.load(p_sorted + tl.minimum(i_half, i_stop - 1)) < key) & (i_first < i_stop)
        i_stop = tl.where(below | (i_first >= i_stop), i_stop, i_half)
        i_first = tl.where(below, i_half + 1, i_first)
    return i_first


@triton.jit(do_not_specialize=["n", "n_rows", "key_of_row_0", "n_steps"])
def find_runs_kernel(
    p_sorted,
    p_offsets,  # [n_rows + 1]
    n,
    n_rows,
    key_of_row_0,
    n_steps,  # of a search among n
    BLOCK_R: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """offsets[r] = how many sorted keys are below key_of_row_0 + r. Compares BLOCK_R rows with BLOCK_I keys at a time."""
    # lint: allow scalar-loop: a search for the two ends of a tile reads single keys
    # lint: allow short-transfer: the indices of a tile's rows are few, wherever they are not all the same
    o_r = tl.arange(0, BLOCK_R)
    o_i = tl.arange(0, BLOCK_I)
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n_rows + 1, BLOCK_R), tl.num_programs(0)):
        i_row = i_tile * BLOCK_R
        i_first = first_not_below(p_sorted, key_of_row_0 + i_row, n * 0, n, n_steps)
        i_stop = first_not_below(p_sorted, key_of_row_0 + tl.minimum(i_row + BLOCK_R, n_rows), i_first, n, n_steps)
        b_below = tl.zeros([BLOCK_R], tl.int32)
        for i in tl.range(i_first, i_stop, BLOCK_I):
            b_key = tl.load(p_sorted + i + o_i, mask=o_i < i_stop - i, other=key_of_row_0 + i_row + BLOCK_R)
            b_row = (b_key - (key_of_row_0 + i_row)).to(tl.float32)  # [BLOCK_I], from 0 to BLOCK_R
            b_is_below = b_row[None, :] < o_r.to(tl.float32)[:, None]  # [BLOCK_R, BLOCK_I]
            b_below += tl.sum(tl.where(b_is_below, 1.0, 0.0), axis=1).to(tl.int32)
        b_offset = (i_first + b_below).to(p_offsets.dtype.element_ty)
        tl.store(p_offsets + i_row + o_r, b_offset, mask=o_r < n_rows + 1 - i_row)
