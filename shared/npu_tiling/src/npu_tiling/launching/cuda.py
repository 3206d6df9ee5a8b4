"""Compiler options of CUDA kernels that reduce rows."""

from __future__ import annotations

_WARP = 32


def row_options(columns: int, warps: int) -> dict[str, int]:
    """Options for a kernel whose tiles have `columns` columns, a power of two, and which sums products along them.

    Where each thread has one element of a row, Triton sums a row by exchanges between threads alone, and fuses a thread's
    own product with the first addition: threads round differently, each has another sum of the row, and all store it.
    """
    fused = columns > _WARP
    return {"num_warps": warps} if fused else {"num_warps": warps, "enable_fp_fusion": False}
