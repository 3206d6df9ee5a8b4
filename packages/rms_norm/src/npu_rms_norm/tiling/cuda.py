"""Blocks of RMSNorm's kernels on CUDA."""

from __future__ import annotations

from math import ceil

from npu_tiling import ALL_TILES, Device
from npu_tiling.budget.arithmetic import power_of_two

from .launches import Launch, SumLaunch
from .problem import Problem

_MOST_CHUNKS = 8  # a fifth of a row is padding at most, and the code of each chunk stands for itself
_LEAST_CHUNK = 256
_MOST_HEADS = 1024  # rows of a group that a kernel is compiled for: heads of a token, not tokens of a sequence
_HELD_FORWARD = 6144  # columns; wider rows are read a second time, from a cache
_SHARED_COLUMNS = 2048  # of a program that shares a row wider than 16384 with others
_SHARED_PER_CORE = 4
_MOST_SHARE = 64
_CORE_REGISTERS = 65536
_WARP = 32


def row_launch(problem: Problem, device: Device, *, backward: bool) -> Launch:
    """Measured on an H200 with the shapes of the documentation's tables; powers of two, as stock Triton asks for."""
    choose = _backward if backward else _forward
    return choose(problem, device, power_of_two(problem.width))


def _forward(problem: Problem, device: Device, whole: int) -> Launch:
    if whole <= 1024:
        elements, warps = (1024, 4) if problem.gated else (2048, 4) if whole <= 256 else (4096, 4)
        block_m, block_g = _rows(problem, elements // whole, of_heads=True)
        plain = problem.itemsizes == (2,) and not (problem.biased or problem.second_output or problem.quantised)
        # The compiler would take some registers more, and fewer programs were resident.
        held = plain and block_g == 1 and problem.width in (64, 128, 256)
        return Launch(problem, device, False, False, True, block_m, whole, block_g, warps, ALL_TILES, 0, held)
    chunk, chunks = _chunks(problem.width)
    if problem.quantised and whole <= 16384:  # the largest result of a row and then its steps: it would be read three times
        warps = (4 if whole <= 2048 else 8 if whole <= 4096 else 16) if chunks == 1 else 8 if whole <= 8192 else 16
        return Launch(problem, device, False, False, True, 1, chunk, warps=warps, per_core=ALL_TILES)
    if chunks > 1 and chunk * chunks <= _HELD_FORWARD:
        return Launch(problem, device, False, False, True, 1, chunk, warps=4 if chunk <= 512 else 8, per_core=ALL_TILES)
    # Two column blocks or more: the second read finds the row in a cache, and fewer registers mean more rows at once.
    warps = 4 if whole <= 2048 else 8 if whole <= 8192 else 16 if whole <= 16384 else 32
    per_core = ALL_TILES if whole <= 16384 else 1  # a second row would push the first out of the nearest cache
    block_n = min(whole // 2, 4096) if warps < 32 else min(whole // 4, 16384)
    return Launch(problem, device, False, True, True, 1, block_n, 1, warps, per_core)


def _backward(problem: Problem, device: Device, whole: int) -> Launch:
    if whole > 16384:
        share = ceil(problem.width / _SHARED_COLUMNS)
        alone = problem.gated or problem.biased or problem.per_head or not problem.with_rows
        if alone or share > min(_MOST_SHARE, device.vector_cores * _SHARED_PER_CORE):
            return _wide_backward(problem, device)
        return Launch(
            problem,
            device,
            True,
            False,
            True,
            1,
            _SHARED_COLUMNS,
            warps=4,
            per_core=_SHARED_PER_CORE,
            share=share,
            held=True,
        )
    chunk, chunks = _chunks(problem.width)
    # As many resident programs as leave each the registers for its partial sum of dw; a gate, and a bias, take more.
    more = problem.gated or problem.biased
    if whole <= 1024 or (chunks == 1 and whole <= 4096):
        block_m, block_g = _rows(problem, (2048 if problem.gated else 4096) // whole)
        ahead = 64 <= whole <= 256 and block_m > 1 and not more and problem.itemsizes == (2, 2)
        per_core = 3 if not (more or ahead) or (problem.gated and block_m > 1) else 2
        held = whole >= 64
        return Launch(problem, device, True, False, True, block_m, whole, block_g, 8, per_core, 0, held, ahead)
    if chunks == 1:
        chunk, chunks = whole // 4, 4  # no less padding, but fewer registers at once than one block takes
    padded = chunk * chunks
    warps = 4 if padded <= 4096 else 8 if padded <= 8192 else 16
    registers = _registers(padded // (warps * _WARP))
    if problem.gated or (problem.biased and padded > 2560):
        warps = min(2 * warps, 16)
    if more:
        registers = 96 if padded // (warps * _WARP) <= 12 else 128
    per_core = _CORE_REGISTERS // (registers * warps * _WARP)
    return Launch(problem, device, True, False, True, 1, chunk, warps=warps, per_core=per_core, held=True)


def _wide_backward(problem: Problem, device: Device) -> Launch:
    return Launch(problem, device, True, True, True, 1, 2048, warps=8, per_core=4)


def smaller(launch: Launch) -> Launch | None:
    """Another launch where the driver, or an older Triton, refuses programs that wait for one another."""
    return _wide_backward(launch.problem, launch.device) if launch.share else None


def _registers(elements: int) -> int:
    """Of a thread that holds so many elements of x, dy and the partial sum of dw, as ptxas counts them."""
    return 80 if elements <= 20 else 96 if elements <= 24 else 128


def _chunks(width: int) -> tuple[int, int]:
    """Columns of the equal chunks of a row that pad it least, and how many there are: the fewest of equal padding."""
    whole = power_of_two(width)
    sizes = [whole >> halvings for halvings in range(4) if whole >> halvings >= _LEAST_CHUNK] or [whole]
    padded, _, chunk = min((ceil(width / size) * size, -size, size) for size in sizes if width <= size * _MOST_CHUNKS)
    return chunk, padded // chunk


def _rows(problem: Problem, wanted: int, *, of_heads: bool = False) -> tuple[int, int]:
    """Rows of a tile, a power of two up to `wanted`, and the groups that they are of, as `Launch.block_g` has it.

    `of_heads`: they may be of several heads that have each its own weight.
    """
    heads = problem.n_outer if problem.per_head else problem.n_inner
    if problem.n_outer > 1 and heads <= _MOST_HEADS and (of_heads or not problem.per_head):
        return _power(wanted), -heads
    return _power(min(problem.max_rows, wanted)), 1


def _power(most: int) -> int:
    """The largest power of two up to `most`."""
    return 1 << (max(1, most).bit_length() - 1)


def sum_launch(width: int, device: Device) -> SumLaunch:
    """Blocks of the kernel that adds the partial sums of dw: narrow ones, so that many programs wait for memory at once."""
    whole = power_of_two(width)
    if whole <= 8192:
        return SumLaunch(width, device, 256, min(8, whole))
    return SumLaunch(width, device, 128 if whole <= 16384 else 32, 64)  # wider rows have fewer partial sums
