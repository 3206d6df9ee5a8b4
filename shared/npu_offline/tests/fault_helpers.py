"""A helper that has the name of another one in fault_kernels.py."""

import triton


@triton.jit
def changed(b_x):
    return b_x + 1.0
