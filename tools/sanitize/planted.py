"""A kernel that can be made to do what compute-sanitizer finds, so that finding nothing elsewhere means something."""

import triton
import triton.language as tl


@triton.jit
def planted_kernel(p_in, p_out, n_past):
    o_col = tl.arange(0, 64)
    tl.store(p_out + o_col, tl.load(p_in + n_past + o_col) + 1.0)
