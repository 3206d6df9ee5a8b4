"""Attention whose values are its keys, on CUDA: kernels and their tile. Formulas: ../formula.py.

A program takes one token at a time. A first sweep over its columns sums products, for all queries; a second one, which finds
the same rows in a cache, computes rows. A thread has the same columns of every source: sums over sources need no exchange
between warps. Sums over columns need one a token: a thread adds up its own VECTOR adjacent columns of every tile first.
"""

import dataclasses
from dataclasses import dataclass

from npu_tiling import Device
from npu_tiling.budget import FP32, WARP, here, power_of_two, row_options
from npu_tiling.device import tl, triton
from npu_tiling.launch import CountTiling

from ..cuda.kernels import widen_tile
from ..formula import (
    add_number,
    add_row,
    factors_of_gradients,
    fetch_rows,
    load_rows,
    pick_number,
    pick_row,
    store_rows,
    weights_of_sources,
)
from . import Keys, KeysBackward


@triton.jit
def load_sources(
    p_v, p_prefix, i_token, s_block, s_token, s_prefix, n_blocks, i_col,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Columns i_col on of a token's blocks and prefix, fp32 [BLOCK_N, BLOCK_D] and [1, BLOCK_D], zero outside."""
    EXACT: tl.constexpr = D % BLOCK_D == 0
    p_block = p_v + i_token * s_token + i_col
    b_v = widen_tile(fetch_rows(p_block, s_block, n_blocks, D - i_col, BLOCK_N, BLOCK_D, EXACT))
    if p_prefix is None:
        b_p = tl.zeros([1, BLOCK_D], tl.float32)
    else:
        b_p = load_rows(p_prefix + i_token * s_prefix + i_col, 0, 1, D - i_col, 1, BLOCK_D, EXACT)
    return b_v, b_p


@triton.jit
def load_each(p_row, s_row, i_col, D: tl.constexpr, BLOCK_D: tl.constexpr, Q: tl.constexpr):
    """Columns i_col on of Q rows, fp32 [1, BLOCK_D] each, zero outside."""
    rows = ()
    for q in tl.static_range(Q):
        rows = rows + (load_rows(p_row + s_row * q + i_col, 0, 1, D - i_col, 1, BLOCK_D, D % BLOCK_D == 0),)
    return rows


@triton.jit
def no_sums(R: tl.constexpr, LANES: tl.constexpr, Q: tl.constexpr):
    """Q times zeros, fp32 [R, LANES]."""
    sums = ()
    for _ in tl.static_range(Q):
        sums = sums + (tl.zeros([R, LANES], tl.float32),)
    return sums


@triton.jit
def sum_neighbours(b_x, VECTOR: tl.constexpr):
    """[R, columns / VECTOR] of [R, columns]: the sums of VECTOR adjacent columns."""
    return tl.sum(tl.reshape(b_x, [b_x.shape[0], b_x.shape[1] // VECTOR, VECTOR]), axis=2)


@triton.jit
def add_products(sums, b_x, rows, VECTOR: tl.constexpr):
    """The sums, to each of which the products of b_x [R, columns] with its row [1, columns] are added."""
    added = ()
    for q in tl.static_range(len(rows)):
        added = added + (sums[q] + sum_neighbours(b_x * rows[q], VECTOR),)
    return added


@triton.jit
def total_of_each(sums, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """[ROWS, BLOCK_N]: row q has the totals of sums q [BLOCK_N, LANES]."""
    b_total = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for q in tl.static_range(len(sums)):
        b_total = add_row(b_total, tl.sum(sums[q], axis=1), q, ROWS)
    return b_total


@triton.jit
def total_of_prefix(sums, ROWS: tl.constexpr):
    """[ROWS]: place q has the total of sums q [1, LANES]."""
    b_total = tl.zeros([ROWS], tl.float32)
    for q in tl.static_range(len(sums)):
        b_total = add_number(b_total, tl.sum(sums[q], axis=1), q, ROWS)
    return b_total


@triton.jit
def row_of_each(b_tile, Q: tl.constexpr, ROWS: tl.constexpr):
    """Q rows of [ROWS, BLOCK_N], each [BLOCK_N, 1]."""
    rows = ()
    for q in tl.static_range(Q):
        rows = rows + (pick_row(b_tile, q, ROWS)[:, None],)
    return rows


@triton.jit
def number_of_each(b_numbers, Q: tl.constexpr, ROWS: tl.constexpr):
    """Q numbers of [ROWS], each [1, 1]."""
    numbers = ()
    for q in tl.static_range(Q):
        numbers = numbers + (pick_number(b_numbers, q, ROWS)[:, None],)
    return numbers


@triton.jit(do_not_specialize=["n_blocks", "n_tokens"])
def attn_res_keys_kernel(
    # read: the blocks, block i of a token at i * s_block; the prefix (None: there is none); fp32 [Q, D] queries
    p_v, p_prefix, p_query,
    # written: h [Q, n_tokens, D]; fp32 s and r, both [n_tokens, Q, sources] (None: no backward follows)
    p_h, p_score, p_rstd,
    n_blocks, n_tokens, s_block, s_token, s_prefix, eps,
    D: tl.constexpr, Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, VECTOR: tl.constexpr,
    ROWS: tl.constexpr,  # >= Q
    STAGES: tl.constexpr,
):  # fmt: skip
    """h of all queries and the statistics; sources come from memory once."""
    LANES: tl.constexpr = BLOCK_D // VECTOR
    for i_turn in tl.range(tl.program_id(0), n_tokens, tl.num_programs(0)):
        i_token = i_turn.to(tl.int64)
        b_square, b_p_square = tl.zeros([BLOCK_N, LANES], tl.float32), tl.zeros([1, LANES], tl.float32)
        dots, p_dots = no_sums(BLOCK_N, LANES, Q), no_sums(1, LANES, Q)
        for i_col in tl.range(0, D, BLOCK_D, num_stages=STAGES):
            b_v, b_p = load_sources(p_v, p_prefix, i_token, s_block, s_token, s_prefix, n_blocks, i_col, D, BLOCK_N, BLOCK_D)
            g = load_each(p_query, D, i_col, D, BLOCK_D, Q)
            b_square += sum_neighbours(b_v * b_v, VECTOR)
            b_p_square += sum_neighbours(b_p * b_p, VECTOR)
            dots, p_dots = add_products(dots, b_v, g, VECTOR), add_products(p_dots, b_p, g, VECTOR)
        b_square, b_p_square = tl.sum(b_square, axis=1)[None, :], tl.sum(b_p_square, axis=1)
        b_weight, b_p_weight = weights_of_sources(
            total_of_each(dots, ROWS, BLOCK_N), b_square, total_of_prefix(p_dots, ROWS), b_p_square,
            p_score, p_rstd, p_prefix, i_token * Q, Q, n_blocks, eps, D, ROWS, BLOCK_N
        )  # fmt: skip
        weights, p_weights = row_of_each(b_weight, Q, ROWS), number_of_each(b_p_weight, Q, ROWS)
        for i_col in tl.range(0, D, BLOCK_D, num_stages=STAGES):
            b_v, b_p = load_sources(p_v, p_prefix, i_token, s_block, s_token, s_prefix, n_blocks, i_col, D, BLOCK_N, BLOCK_D)
            for q in tl.static_range(Q):
                b_h = tl.sum(b_v * weights[q], axis=0)[None, :] + b_p * p_weights[q]
                p_row = p_h + (tl.cast(n_tokens, tl.int64) * q + i_token) * D + i_col
                store_rows(p_row, 0, b_h, 1, D - i_col, 1, BLOCK_D, D % BLOCK_D == 0)


@triton.jit(do_not_specialize=["n_blocks", "n_tokens"])
def attn_res_keys_backward_kernel(
    # read: the gradient of h, contiguous [Q, n_tokens, D]; as of attn_res_keys_kernel
    p_dh, p_v, p_prefix, p_query, p_score, p_rstd,
    # written: gradients of the blocks [n_tokens, n_blocks, D] and of the prefix (None: not needed); fp32 [programs, Q, D],
    # sums of dg of each program's tokens (None: not needed)
    p_dv, p_dprefix, p_dg,
    n_blocks, n_tokens, s_block, s_token, s_prefix,
    D: tl.constexpr, Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, VECTOR: tl.constexpr,
    ROWS: tl.constexpr,  # >= Q
    STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of blocks and prefix, and partial sums of dg, which a program adds to in the L2 cache."""
    LANES: tl.constexpr = BLOCK_D // VECTOR
    EXACT: tl.constexpr = D % BLOCK_D == 0
    s_query = tl.cast(n_tokens, tl.int64) * D
    for i_turn in tl.range(tl.program_id(0), n_tokens, tl.num_programs(0)):
        i_token = i_turn.to(tl.int64)
        products, p_products = no_sums(BLOCK_N, LANES, Q), no_sums(1, LANES, Q)
        for i_col in tl.range(0, D, BLOCK_D, num_stages=STAGES):
            b_v, b_p = load_sources(p_v, p_prefix, i_token, s_block, s_token, s_prefix, n_blocks, i_col, D, BLOCK_N, BLOCK_D)
            dh = load_each(p_dh + i_token * D, s_query, i_col, D, BLOCK_D, Q)
            products, p_products = add_products(products, b_v, dh, VECTOR), add_products(p_products, b_p, dh, VECTOR)
        b_a, b_c, b_k, b_p_a, b_p_c, b_p_k = factors_of_gradients(
            total_of_each(products, ROWS, BLOCK_N), total_of_prefix(p_products, ROWS),
            p_score, p_rstd, p_prefix, i_token * Q, Q, n_blocks, D, ROWS, BLOCK_N
        )  # fmt: skip
        b_k, b_p_k = tl.sum(b_k, axis=0)[:, None], tl.sum(b_p_k[None, :], axis=1)[:, None]
        a, c = row_of_each(b_a, Q, ROWS), row_of_each(b_c, Q, ROWS)
        p_a, p_c = number_of_each(b_p_a, Q, ROWS), number_of_each(b_p_c, Q, ROWS)
        for i_col in tl.range(0, D, BLOCK_D, num_stages=STAGES):
            n_cols = D - i_col
            b_v, b_p = load_sources(p_v, p_prefix, i_token, s_block, s_token, s_prefix, n_blocks, i_col, D, BLOCK_N, BLOCK_D)
            dh = load_each(p_dh + i_token * D, s_query, i_col, D, BLOCK_D, Q)
            g = load_each(p_query, D, i_col, D, BLOCK_D, Q)
            b_dv, b_dp = -b_v * b_k, -b_p * b_p_k
            for q in tl.static_range(Q):
                b_dv += g[q] * c[q] + dh[q] * a[q]
                b_dp += g[q] * p_c[q] + dh[q] * p_a[q]
                if p_dg is not None:
                    p_part = p_dg + (tl.program_id(0).to(tl.int64) * Q + q) * D + i_col
                    n_before = tl.where(i_turn >= tl.num_programs(0), n_cols, 0)  # nothing lies there before the first turn
                    b_dg = load_rows(p_part, 0, 1, n_before, 1, BLOCK_D, False)
                    b_dg += tl.sum(b_v * c[q], axis=0)[None, :] + b_p * p_c[q]
                    store_rows(p_part, 0, b_dg, 1, n_cols, 1, BLOCK_D, EXACT)
            if p_dv is not None:
                store_rows(p_dv + i_token * n_blocks * D + i_col, D, b_dv, n_blocks, n_cols, BLOCK_N, BLOCK_D, EXACT)
            if p_dprefix is not None:
                store_rows(p_dprefix + i_token * D + i_col, 0, b_dp, 1, n_cols, 1, BLOCK_D, EXACT)


MAX_BLOCKS, MAX_QUERIES = 64, 16
_COLUMNS, _FEW_BLOCKS, _ELEMENTS = 1024, 16, 4096  # of a tile; where there are more blocks, it has so many elements
_STAGES = 3  # tiles under way, at most
_CACHE_BYTES = 40 * 2**20  # of the tokens of all programs, which stay in the L2 cache
_CORE_WARPS = 8  # of a multiprocessor's programs
_NARROW, _NARROW_CORE_WARPS = 2, 16  # the same of programs of at most so many warps


@dataclass(frozen=True, kw_only=True, repr=False)
class KeysTiling(CountTiling):
    """A tile of the sources of one token."""

    def __repr__(self) -> str:
        """As warnings name it."""
        return f"tile={self.constants['BLOCK_N']} x {self.constants['BLOCK_D']}, {self.warps} warps"

    @property
    def options(self) -> dict[str, int]:
        return row_options(self.constants["BLOCK_D"], self.warps)

    def partials(self, n_tokens: int) -> int:
        """Partial sums of dg that a backward stores: one a program."""
        return self.grid(n_tokens)

    def smaller(self) -> "KeysTiling | None":
        """Half of the columns, for a compiler that needs more memory on chip; None at the end."""
        columns = self.constants["BLOCK_D"] // 2
        if not columns:
            return None
        blocks = {**self.constants, "BLOCK_D": columns, "VECTOR": min(self.constants["VECTOR"], columns)}
        warps = max(1, self.warps // 2)
        return dataclasses.replace(self, blocks=tuple(blocks.items()), warps=warps, why="the compiler refused a larger tile")


def choose(task: str, call: Keys | KeysBackward, device: Device) -> KeysTiling | None:
    """A tile whose warps stand side by side along the columns; None of too many blocks or queries."""
    n_blocks, (n_queries, width) = call.bank.shape[-2], call.query.shape
    if n_blocks > MAX_BLOCKS or n_queries > MAX_QUERIES:
        return None
    block_n = power_of_two(max(2, n_blocks))
    columns = min(power_of_two(width), _COLUMNS if block_n <= _FEW_BLOCKS else _ELEMENTS // block_n)
    vector = min(16 // call.bank.dtype.itemsize, columns)  # a thread's load has 16 bytes
    warps = max(1, columns // (WARP * vector))
    itemsize, is_forward = call.bank.dtype.itemsize, task == "forward"
    cached_bytes = n_blocks * itemsize + FP32 * (1 if is_forward else 1 + n_queries)  # of a column: sources, dh
    cached = _CACHE_BYTES // (device.vector_cores * cached_bytes * width)
    fp32_rows = 1 + n_queries * (1 if is_forward else 3)  # of a tile: prefix, g, of a backward dh and dg
    shared_bytes = block_n * itemsize + FP32 * fp32_rows
    stages = min(_STAGES, 1 + device.ub_bytes // (shared_bytes * columns))
    blocks = {"D": width, "Q": n_queries, "ROWS": power_of_two(n_queries), "STAGES": stages}
    blocks |= {"BLOCK_N": block_n, "BLOCK_D": columns, "VECTOR": vector}
    of_core = (_NARROW_CORE_WARPS if warps <= _NARROW else _CORE_WARPS) // warps
    limit = "the L2 cache has room for their tokens" if cached < of_core else f"each has {warps} warps"
    per_core = max(1, min(cached, of_core))
    return KeysTiling(
        device=device,
        blocks=tuple(blocks.items()),
        per_core=per_core,
        warps=warps,
        why=f"tiles of {columns} columns of all {call.n_sources} sources, {per_core} programs a multiprocessor: {limit}",
        decided_at=here(),
    )
