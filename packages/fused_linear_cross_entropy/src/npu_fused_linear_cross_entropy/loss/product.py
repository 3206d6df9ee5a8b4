"""Kernels of the product whose epilogue stores exponentials instead of logits, and their launches.

CUDA, for GPUs that have TMA and wgmma.

    z = logit_scale x w^T      E = exp(z - k)      sums of E over each tile's columns      k: a reference of the row

A tile of logits stays in registers: exponentials are written once, in bf16, and logits never. The reference of a row has to
be known before: it is the logit of the row's target, or of the first column. Rows that rise above it by more than
PRODUCT_LIMIT note their maximum, and `cross_entropy_product_again_kernel` computes their tiles again, with that maximum as
the reference.

Tiles are taken column by column, so that programs that run together read the same rows of the weight. x is read through a
descriptor too: elements outside a tensor are read as zero, and not written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from npu_tiling.budget import here
from npu_tiling.calls import Empty
from npu_tiling.device import tl, triton
from npu_tiling.launch import CountTiling, descriptor_type
from npu_tiling.plans import Plan

from ..call import FP32, Options
from ..formula import LOG2E, PRODUCT_LIMIT
from ..head import clone, part
from ..tiling import ProductTiling
from . import scales_of

MAX_REFERENCE: tl.constexpr = tl.constexpr(1e30)  # a reference is finite, or every exponential of its row would be no number


@triton.jit(do_not_specialize=["n_rows", "first"])
def cross_entropy_references_kernel(
    p_x,  # [rows, H]
    p_weight,  # [N, H]
    p_target,  # int32 [rows], negative: none
    p_reference,  # fp32 [rows]: the target's z, the first column's where that is none here
    p_top,  # fp32 [rows]: the same
    p_target_logit,  # fp32 [rows]: the target's z, 0 where that is none here
    n_rows, s_x, s_weight,
    first,  # the column of the vocabulary that column 0 is
    logit_scale,
    N: tl.constexpr, H: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """The reference of each row, one row a program: its target's logit, or the first column's where that is none here."""
    i_row = tl.program_id(0).to(tl.int64)
    column = tl.load(p_target + i_row) - first
    here = (column >= 0) & (column < N)
    p_row = p_weight + tl.where(here, column, 0).to(tl.int64) * s_weight
    o_h = tl.arange(0, BLOCK_H)
    b_sum = tl.zeros([BLOCK_H], tl.float32)
    for i_h in tl.range(0, H, BLOCK_H):
        m_h = i_h + o_h < H
        b_x = tl.load(p_x + i_row * s_x + i_h + o_h, mask=m_h, other=0.0).to(tl.float32)
        b_sum += b_x * tl.load(p_row + i_h + o_h, mask=m_h, other=0.0).to(tl.float32)
    z = tl.sum(b_sum, axis=0) * logit_scale
    reference = tl.minimum(tl.maximum(z, -MAX_REFERENCE), MAX_REFERENCE)
    tl.store(p_reference + i_row, reference)
    tl.store(p_top + i_row, reference)
    tl.store(p_target_logit + i_row, tl.where(here, z, 0.0))


@triton.jit
def place_of_tile(i_tile, n_row_tiles, n_column_tiles, GROUP: tl.constexpr):
    """The tile of rows and of columns: GROUP tiles of rows, then the next tile of columns."""
    of_group = GROUP * n_column_tiles
    i_first = i_tile // of_group * GROUP
    n_here = tl.minimum(n_row_tiles - i_first, GROUP)
    return i_first + i_tile % of_group % n_here, i_tile % of_group // n_here


@triton.jit
def multiply_tile(
    d_x, d_weight, i_row, i_column, H: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr
):  # fmt: skip
    """A tile of x w^T, fp32 [BLOCK_M, BLOCK_N]."""
    b_z = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i_h in tl.range(0, H, BLOCK_H):
        b_z = tl.dot(d_x.load([i_row, i_h]), d_weight.load([i_column, i_h]).T, b_z)
    return b_z


@triton.jit
def exponentiate_half(
    b_z, b_reference, d_exponentials, i_row, i_column, N, logit_scale, COLUMNS: tl.constexpr
):  # fmt: skip
    """Stores exponentials of [BLOCK_M, COLUMNS] raw logits; returns their sums and the logits' maxima, [BLOCK_M]."""
    if logit_scale is not None:
        b_z *= logit_scale
    b_e = tl.exp2(b_z * LOG2E - (b_reference * LOG2E)[:, None])
    if i_column + COLUMNS > N:  # in other tiles a mask is a tenth of the time that exponentials take
        m_column = (i_column + tl.arange(0, COLUMNS) < N)[None, :]
        b_e = tl.where(m_column, b_e, 0.0)
        b_z = tl.where(m_column, b_z, -float("inf"))
    if d_exponentials is not None:
        d_exponentials.store([i_row, i_column], b_e.to(tl.bfloat16))
    return tl.sum(b_e, axis=1), tl.max(b_z, axis=1)


@triton.jit
def exponentiate_tile(
    b_z, b_reference, d_exponentials, i_row, i_column, N, logit_scale, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Exponentials of a tile. Its halves are stored one after the other, which takes less shared memory."""
    HALF: tl.constexpr = BLOCK_N // 2
    b_left, b_right = tl.split(tl.permute(tl.reshape(b_z, (BLOCK_M, 2, HALF)), (0, 2, 1)))
    b_sum, b_top = exponentiate_half(b_left, b_reference, d_exponentials, i_row, i_column, N, logit_scale, HALF)
    b_more, b_next = exponentiate_half(b_right, b_reference, d_exponentials, i_row, i_column + HALF, N, logit_scale, HALF)
    return b_sum + b_more, tl.maximum(b_top, b_next)


@triton.jit(do_not_specialize=["n_rows", "N"])
def cross_entropy_product_kernel(
    p_reference,  # fp32 [rows]
    p_top,  # fp32 [rows]: raised to the maximum of rows that rise above the reference by PRODUCT_LIMIT
    p_sums,  # fp32 [tiles of columns, rows]
    d_x,  # [rows, H], tiles of [BLOCK_M, BLOCK_H]
    d_weight,  # [N, H], some rows of the weight, tiles of [BLOCK_N, BLOCK_H]
    d_exponentials,  # [rows, N], tiles of [BLOCK_M, BLOCK_N / 2]; None: sums alone are wanted
    n_rows, N, logit_scale,
    H: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Exponentials of x w^T, their sums over each tile's columns, and maxima of rows far above their reference."""
    n_row_tiles, n_column_tiles = tl.cdiv(n_rows, BLOCK_M), tl.cdiv(N, BLOCK_N)
    # One loop over tiles and terms: the next tile's operands are loaded while this one's exponentials are computed.
    for i_tile in tl.range(tl.program_id(0), n_row_tiles * n_column_tiles, tl.num_programs(0), flatten=True):
        i_row_tile, i_column_tile = place_of_tile(i_tile, n_row_tiles, n_column_tiles, GROUP)
        i_row, i_column = i_row_tile * BLOCK_M, i_column_tile * BLOCK_N
        b_z = multiply_tile(d_x, d_weight, i_row, i_column, H, BLOCK_M, BLOCK_N, BLOCK_H)
        o_row = i_row + tl.arange(0, BLOCK_M)
        m_row = o_row < n_rows
        b_reference = tl.load(p_reference + o_row, mask=m_row, other=0.0)
        b_sum, b_top = exponentiate_tile(b_z, b_reference, d_exponentials, i_row, i_column, N, logit_scale, BLOCK_M, BLOCK_N)
        tl.store(p_sums + i_column_tile.to(tl.int64) * n_rows + o_row, b_sum, mask=m_row)
        tl.atomic_max(p_top + o_row, b_top, mask=m_row & (b_top > b_reference + PRODUCT_LIMIT), sem="relaxed")


@triton.jit(do_not_specialize=["n_rows", "N"])
def cross_entropy_product_again_kernel(
    p_reference,  # these as above
    p_top, p_sums, d_x, d_weight, d_exponentials,
    n_rows, N, logit_scale,
    H: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Computes again the tiles whose rows rose above their reference, from their maximum; mostly none."""
    o_all = tl.arange(0, 1024)
    b_raised = tl.zeros([1024], tl.float32)
    for i_row in tl.range(0, n_rows, 1024):
        m_row = i_row + o_all < n_rows
        b_reference = tl.load(p_reference + i_row + o_all, mask=m_row, other=0.0)
        b_raised += tl.where(tl.load(p_top + i_row + o_all, mask=m_row, other=0.0) > b_reference, 1.0, 0.0)
    if tl.max(b_raised, axis=0) > 0.0:
        n_row_tiles, n_column_tiles = tl.cdiv(n_rows, BLOCK_M), tl.cdiv(N, BLOCK_N)
        for i_tile in tl.range(tl.program_id(0), n_row_tiles * n_column_tiles, tl.num_programs(0)):
            i_row_tile, i_column_tile = place_of_tile(i_tile, n_row_tiles, n_column_tiles, GROUP)
            i_row, i_column = i_row_tile * BLOCK_M, i_column_tile * BLOCK_N
            o_row = i_row + tl.arange(0, BLOCK_M)
            m_row = o_row < n_rows
            b_reference = tl.load(p_top + o_row, mask=m_row, other=0.0)
            b_before = tl.load(p_reference + o_row, mask=m_row, other=0.0)
            if tl.max(tl.where(b_reference > b_before, 1.0, 0.0), axis=0) > 0.0:
                b_z = multiply_tile(d_x, d_weight, i_row, i_column, H, BLOCK_M, BLOCK_N, BLOCK_H)
                b_sum, _ = exponentiate_tile(
                    b_z, b_reference, d_exponentials, i_row, i_column, N, logit_scale, BLOCK_M, BLOCK_N
                )  # fmt: skip
                tl.store(p_sums + i_column_tile.to(tl.int64) * n_rows + o_row, b_sum, mask=m_row)


@triton.jit(do_not_specialize=["n_rows", "n_tiles", "s_statistics"])
def cross_entropy_product_sums_kernel(
    p_partials,  # fp32 [tiles of columns, rows]
    p_top,  # fp32 [rows]: k
    p_target_logit,  # fp32 [rows]
    p_statistics,  # fp32 [7, rows]: k, sum of exp(z - k), the target's z
    n_rows, n_tiles, s_statistics,
    BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Statistics of rows: sums of exponentials over all tiles of columns, references, and targets' logits."""
    o_row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_row = o_row < n_rows
    b_sum = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
    for i_tile in tl.range(0, n_tiles, BLOCK_T):
        o_tile = i_tile + tl.arange(0, BLOCK_T)
        m_tile = (o_tile < n_tiles)[:, None] & m_row[None, :]
        b_sum += tl.load(p_partials + o_tile.to(tl.int64)[:, None] * n_rows + o_row[None, :], mask=m_tile, other=0.0)
    tl.store(p_statistics + o_row, tl.load(p_top + o_row, mask=m_row), mask=m_row)
    tl.store(p_statistics + s_statistics + o_row, tl.sum(b_sum, axis=0), mask=m_row)
    tl.store(p_statistics + 2 * s_statistics + o_row, tl.load(p_target_logit + o_row, mask=m_row), mask=m_row)


# Launches.

_SUM_ROWS, _SUM_TILES = 32, 256


class _Listed(NamedTuple):
    """Stands for a descriptor in dry runs without Triton."""

    base: Any
    block_shape: list[int]


def _descriptor(matrix: Any, *block: int) -> Any:
    """A descriptor of blocks of a matrix."""
    kind = descriptor_type()
    return _Listed(matrix, [*block]) if kind is None else kind.from_tensor(matrix, [*block])


class ExponentialProduct:
    """E = exp(z - k) [rows, V] of z = logit_scale x w^T, and sums of E, in a plan.

    Args:
        p: the plan.
        weight: [V, H].
        options: of the loss.
    """

    def __init__(self, p: Plan, weight: Any, options: Options) -> None:
        self._p, self._weight, self._options = p, weight, options
        self._tiling = ProductTiling(width=weight.shape[1], device=p.chip)
        self._memory: Any = None  # for sums, which chunks of equal length share

    def statistics(self, x: Any, target: Any, result: Any, parts: Sequence[tuple[slice, Any]]) -> Any:
        """Writes statistics [7, rows] and, given memory, exponentials.

        Args:
            x: [rows, H].
            target: int32 [rows], columns of the whole vocabulary.
            parts: slices of the weight's rows, which cover all of them, each with memory [rows, columns] for E or None.

        Returns:
            The final k [rows]: the target's logit (the first column's, where the target is elsewhere), or the row's
            maximum where that is larger by more than 60.
        """
        p, rows, (vocabulary, width) = self._p, x.shape[0], self._weight.shape
        both = p.new(Empty((2, rows), FP32))
        k, top = (p.view(both, (rows,), (1,), i * rows) for i in range(2))
        target_logit, sums = p.new(Empty((rows,), FP32)), self._sums_of(rows, parts)
        why = "a program multiplies one row of x by its target's row of the weight"
        blocks = (("N", vocabulary), ("H", width), ("BLOCK_H", 1024))
        sizes = {"s_x": x.strides[0], "s_weight": self._weight.strides[0], "first": self._options.vocab_first}
        p.launch_over(
            cross_entropy_references_kernel,
            CountTiling(device=p.chip, blocks=blocks, why=why, decided_at=here()),
            rows,
            reads={"p_x": x, "p_weight": self._weight, "p_target": target},
            writes={"p_reference": k, "p_top": top, "p_target_logit": target_logit},
            sizes={"n_rows": rows, **sizes, "logit_scale": self._options.logit_scale},
        )
        products = [
            self._operands(x, columns, exponentials, k, top, part_sums)
            for (columns, exponentials), part_sums in zip(parts, sums, strict=True)
        ]
        for kernel in (cross_entropy_product_kernel, cross_entropy_product_again_kernel):
            for operands, (columns, _) in zip(products, parts, strict=True):
                self._multiply(kernel, operands, columns)
        why = "a program adds the sums of 32 rows over all tiles of columns"
        tile = (("BLOCK_M", _SUM_ROWS), ("BLOCK_T", _SUM_TILES))
        p.launch_over(
            cross_entropy_product_sums_kernel,
            CountTiling(device=p.chip, blocks=tile, per_program=_SUM_ROWS, why=why, decided_at=here()),
            rows,
            reads={"p_partials": self._memory, "p_top": top, "p_target_logit": target_logit},
            writes={"p_statistics": result},
            sizes={"n_rows": rows, "n_tiles": self._memory.shape[0], "s_statistics": result.strides[0]},
        )
        return top

    def exponentials(self, x: Any, k: Any, result: Any) -> None:
        """Writes E [rows, V], given the final k [rows]."""
        everything = slice(0, self._weight.shape[0])
        (sums,) = self._sums_of(x.shape[0], ((everything, result),))
        top = clone(self._p, k)
        operands = self._operands(x, everything, result, k, top, sums)
        self._multiply(cross_entropy_product_kernel, operands, everything)

    def _operands(self, x: Any, columns: slice, exponentials: Any, k: Any, top: Any, sums: Any) -> dict[str, dict[str, Any]]:
        """What a launch over some of the weight's rows reads and writes."""
        p, (block_m, block_n, block_h) = self._p, self._tiling.blocks
        d_x = p.descriptor(x, (block_m, block_h), _descriptor)
        d_weight = p.descriptor(part(p, self._weight, columns), (block_n, block_h), _descriptor)
        stored = None if exponentials is None else p.descriptor(exponentials, (block_m, block_n // 2), _descriptor)
        return {
            "reads": {"p_reference": k, "d_x": d_x, "d_weight": d_weight},
            "writes": {"p_top": top, "p_sums": sums, "d_exponentials": stored},
        }

    def _multiply(self, kernel: Any, operands: dict[str, dict[str, Any]], columns: slice) -> None:
        rows, scale = operands["reads"]["p_reference"].shape[0], scales_of(self._options)["logit_scale"]
        width, name = columns.stop - columns.start, kernel.__name__
        tiling = self._p.decide(name, self._tiling)
        sizes = {"n_rows": rows, "N": width, "logit_scale": scale}
        self._p.launch(kernel, name, tiling.grid(rows, width), **operands, sizes=sizes)

    def _sums_of(self, rows: int, parts: Sequence[tuple[slice, Any]]) -> tuple[Any, ...]:
        """Memory [tiles of columns, rows] for sums of each part."""
        tiles = [self._tiling.column_tiles(columns.stop - columns.start) for columns, _ in parts]
        if self._memory is None or self._memory.shape != (sum(tiles), rows):
            self._memory = self._p.new(Empty((sum(tiles), rows), FP32))
        starts = [sum(tiles[:i]) for i in range(len(tiles))]
        places = [slice(start, start + count) for start, count in zip(starts, tiles, strict=True)]
        return tuple(part(self._p, self._memory, place) for place in places)
