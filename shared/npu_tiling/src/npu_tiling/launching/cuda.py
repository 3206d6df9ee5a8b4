"""What the launches of several operators' CUDA kernels need: equal chunks of a row, register caps, compiler options."""

from __future__ import annotations

from math import ceil

from ..budget.arithmetic import power_of_two

WARP = 32  # threads
CORE_WARPS = 64  # resident on one core (streaming multiprocessor) at most
CORE_REGISTERS = 65536  # 32-bit registers of one core
MAX_REGISTERS = 255  # of one thread
_REGISTER_UNIT = 8  # a thread's registers are allocated in multiples of this
_HALVINGS = 3  # of the padded row, to find chunks


def row_options(columns: int, warps: int) -> dict[str, int]:
    """Options for a kernel whose tiles have `columns` columns, a power of two, and which sums products along them.

    Where each thread has one element of a row, Triton sums a row by exchanges between threads alone, and fuses a thread's
    own product with the first addition: threads round differently, each has another sum of the row, and all store it.
    """
    fused = columns > WARP
    return {"num_warps": warps} if fused else {"num_warps": warps, "enable_fp_fusion": False}


def register_cap(warps: int, per_core: int) -> int:
    """The most registers a thread may have (`maxnreg`) so that `per_core` programs of `warps` warps are resident on a core.

    At least one thread's share of a core that is full of warps: a core holds no more programs than its 64 warps make.
    """
    resident = min(per_core, CORE_WARPS // warps)
    return min(MAX_REGISTERS, CORE_REGISTERS // (resident * warps * WARP) // _REGISTER_UNIT * _REGISTER_UNIT)


def equal_chunks(width: int, *, least: int) -> tuple[int, int]:
    """Columns of the equal chunks that a row is split in, and their number: least padding first, then the fewest chunks.

    There are at most eight.

    Args:
        width: columns of the row.
        least: columns of the smallest chunk. Chunks are powers of two.
    """
    padded_row = power_of_two(width)
    sizes = [padded_row >> halvings for halvings in range(_HALVINGS + 1)]
    sizes = [size for size in sizes if size >= least] or [padded_row]
    padded, _, chunk = min((ceil(width / size) * size, -size, size) for size in sizes)
    return chunk, padded // chunk
