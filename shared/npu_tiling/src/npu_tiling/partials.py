"""Partial sums: how kernels store them, and the kernel that adds them, with its tile."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from .budget import ALL_TILES, FP32, Block, Tile, fit, here, power_of_two, round_up
from .chips import Device
from .device import places_below, store_block, tl, triton
from .launch import CountTiling
from .plans import Plan, Slot


@triton.jit
def store_partial(p_partials, b_terms, i_partial, o_col, N: tl.constexpr, EXACT: tl.constexpr):
    """Stores the sum over the rows of b_terms [rows, columns] as row i_partial of p_partials, fp32 [partials, N].

    EXACT: every column of o_col is below N.
    """
    p_partial = p_partials + tl.cast(i_partial, tl.int64) * N + o_col
    store_block(p_partial, tl.sum(b_terms, axis=0), m_block=places_below(o_col, N, EXACT))


@triton.jit
def sum_of_partials(p_partials, n_partials, o_col, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """fp32 [BLOCK_N]: the sum over the rows of p_partials, fp32 [n_partials, N], at the columns o_col [BLOCK_N]."""
    o_row = tl.arange(0, BLOCK_M)
    b_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i_partial in tl.range(0, n_partials, BLOCK_M):
        p_tile = p_partials + tl.cast(i_partial, tl.int64) * N + (o_row[:, None] * N + o_col[None, :])
        m_tile = (o_row < n_partials - i_partial)[:, None]
        if N % BLOCK_N != 0:
            m_tile = m_tile & (o_col < N)[None, :]
        b_sum += tl.load(p_tile, mask=m_tile, other=0.0)
    return tl.sum(b_sum, axis=0)


@triton.jit(do_not_specialize=["n_partials"])
def sum_partials_kernel(
    p_partials,  # fp32 [n_partials, N]
    p_total,  # [N], of any float dtype
    n_partials,
    N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """total = the sum of the partial sums, rounded once to total's dtype. A program takes blocks of columns."""
    # lint: allow short-transfer: the partial sums of all cores are a few KiB, of which every core adds some columns
    for i_block in tl.range(tl.program_id(0), tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
        o_col = i_block * BLOCK_N + tl.arange(0, BLOCK_N)
        b_total = sum_of_partials(p_partials, n_partials, o_col, N, BLOCK_M, BLOCK_N).to(p_total.dtype.element_ty)
        store_block(p_total + o_col, b_total, m_block=places_below(o_col, N, N % BLOCK_N == 0))


TRANSFER_BYTES = 12 * 1024  # of one tile on Ascend: the next tile is loaded while one is added
MAX_ROWS = 64  # of a tile on Ascend; chips have up to 72 vector cores, and each stores one partial sum

# On CUDA, by the width of a row, up to and including: rows and columns of a tile, and warps. Narrow tiles let many programs
# wait for memory at once; launches of wider rows have fewer partial sums. Chosen with the backwards of rms_norm on an H200:
# 65536 x 512 take 3.0 us of 56.6 in place of 4.3, 2048 x 512 take 2.5 of 6.6 in place of 3.4.
CUDA_TILES: tuple[tuple[int, int, int, int, str], ...] = (
    # width  rows  columns  warps
    (1024, 512, 8, 8, here()),
    (4096, 256, 8, 4, here()),
    (8192, 128, 16, 4, here()),
    (16384, 128, 64, 4, here()),
    (2**31, 32, 64, 4, here()),
)


class SumTiling(CountTiling):
    """Of the launch that adds partial sums [n, width] over n: a program takes columns and loops over rows."""

    @property
    def options(self) -> Mapping[str, Any]:
        # With two buffers for a single row CANN 9.0 and 9.1 put no barrier between the additions to it.
        is_single = self.device.kind == "ascend" and self.constants["BLOCK_M"] == 1
        return {"multibuffer": False} if is_single else super().options


def _sum_tiling(width: int, device: Device, rows: int, columns: int, place: str, warps: int = 0) -> SumTiling:
    return SumTiling(
        device=device,
        blocks=(("N", width), ("BLOCK_M", rows), ("BLOCK_N", columns)),
        column_blocks=ceil(width / columns),
        per_core=ALL_TILES,
        warps=warps,
        why="every program adds all partial sums of some columns",
        decided_at=place,
    )


def choose_sum(width: int, device: Device) -> SumTiling:
    """The tiling for rows of `width` elements. On Ascend every core gets columns before one gets more than it needs."""
    if device.kind == "cuda":
        rows, columns, warps, place = next(row[1:] for row in CUDA_TILES if power_of_two(width) <= row[0])
        return _sum_tiling(width, device, rows, min(columns, power_of_two(width)), place, warps)
    unit, tile = device.ub_align // FP32, ("BLOCK_M", "BLOCK_N")
    padded = round_up(width, unit)
    columns = min(padded, round_up(ceil(padded / device.vector_cores), unit))
    rows = min(device.vector_cores, MAX_ROWS, max(1, TRANSFER_BYTES // (columns * FP32)))
    tiles = [Tile("partial sums", tile, FP32, 2), Tile("sum", tile, FP32), Tile("sum over rows", tile, FP32)]
    blocks = fit(tiles, (Block("BLOCK_M", rows), Block("BLOCK_N", columns, unit, unit)), device)
    return _sum_tiling(width, device, blocks["BLOCK_M"], blocks["BLOCK_N"], here())


def add_partials(p: Plan, decision: str, partials: Any, total: Slot) -> None:
    """Adds a launch that sums `partials`, fp32 [n, total.numel()], over n into `total`, in a fixed order."""
    p.launch_over(
        sum_partials_kernel,
        choose_sum(total.numel(), p.chip),
        1,
        decision=decision,
        reads={"p_partials": partials},
        writes={"p_total": total},
        sizes={"n_partials": partials.shape[0]},
    )
