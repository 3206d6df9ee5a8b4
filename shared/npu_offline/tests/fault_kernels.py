"""The smallest kernels that show what a compiler does wrong. What each one is to show: COMPILER_FAULTS.md."""

import triton
import triton.language as tl


@triton.jit
def shared_buffer_kernel(p_x, p_y, n_rows, n_blocks, BLOCK: tl.constexpr):
    """Row i of y is the sum of rows i * n_blocks to (i + 1) * n_blocks - 1 of x, which is loaded one row ahead."""
    o_col = tl.arange(0, BLOCK)
    b_x = tl.load(p_x + o_col).to(tl.float32)
    for i_row in tl.range(0, n_rows):
        p_next = p_x + (i_row * n_blocks + 1) * BLOCK
        b_sum = b_x  # begins as what is carried; a product with a computed 1.0 keeps them apart
        b_x = tl.load(p_next + o_col).to(tl.float32)
        for _ in tl.range(1, n_blocks):
            p_next += BLOCK
            b_next = tl.load(p_next + o_col)
            b_sum += b_x * b_x
            b_x = b_next.to(tl.float32)
        tl.store(p_y + i_row * BLOCK + o_col, b_sum)


@triton.jit
def dropped_rounding_kernel(p_x, p_y, BLOCK: tl.constexpr, APART: tl.constexpr):
    """y = 3 round(x / 3), x and y fp32, rounded to bf16. APART: a change of shape stands between the casts."""
    o_col = tl.arange(0, BLOCK)
    b_x = (tl.load(p_x + o_col) * (1.0 / 3.0)).to(tl.bfloat16)
    if APART:
        b_x = tl.reshape(tl.expand_dims(b_x, 0).to(tl.float32), (BLOCK,))
    else:
        b_x = b_x.to(tl.float32)
    tl.store(p_y + o_col, b_x * 3.0)
