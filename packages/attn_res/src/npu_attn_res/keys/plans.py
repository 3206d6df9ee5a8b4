"""The plans of attention whose values are its keys, for all chips; Ascend's kernels and their tile. Formulas: ../formula.py.

One launch forward; one backward, and one that adds its partial sums. Where no tile fits, PyTorch's operators compute.

On Ascend a program takes BLOCK_M tokens a turn, and of a token all blocks and BLOCK_D columns at once. A first sweep over
their columns sums products, for all queries; a second one, which finds the same rows in the cache (L2), computes rows.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from npu_tiling import Device, Tile, UnifiedBufferError, fit, footprint
from npu_tiling.budget import FP32, INT32_END, Block, equal_blocks, here, round_up
from npu_tiling.calls import Empty
from npu_tiling.device import tl, triton
from npu_tiling.launch import CountTiling
from npu_tiling.partials import add_partials
from npu_tiling.plans import Plan
from npu_tiling.rows import row_stride

from ..formula import (
    add_number,
    add_row,
    factors_of_gradients,
    is_number,
    load_rows,
    pick_number,
    pick_row,
    store_rows,
    weights_of_sources,
)
from ..plans import zero
from ..sources import at_one_stride, strides_of
from . import Keys, KeysBackward, compute_keys, compute_keys_backward, cuda


@triton.jit(do_not_specialize=["n_blocks", "n_tokens"])
def attn_res_keys_kernel(
    # read: the blocks, block i of a token at i * s_block; the prefix (None: there is none); fp32 [Q, D] queries
    p_v, p_prefix, p_query,
    # written: h [Q, n_tokens, D]; fp32 s and r, both [n_tokens, Q, sources] (None: no backward follows)
    p_h, p_score, p_rstd,
    n_blocks, n_tokens, s_block, s_token, s_prefix, eps,
    D: tl.constexpr, Q: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,  # >= BLOCK_M * Q
):  # fmt: skip
    """h of all queries and the statistics; sources come from memory once."""
    # lint: allow short-transfer: all blocks of a token come at once, in equal pieces of columns; statistics are few numbers
    # lint: allow strided-transfer: the prefix's statistics stand behind those of the blocks
    # lint: allow unaligned-rows: statistics have as many columns as there are sources; rows are as wide as the caller's
    # lint: allow fill-in-loop: where the padding of such rows takes part in a sum, it has to be zero
    EXACT: tl.constexpr = D % BLOCK_D == 0
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n_tokens, BLOCK_M), tl.num_programs(0)):
        i_first = i_tile.to(tl.int64) * BLOCK_M
        n_here = tl.minimum(n_tokens - i_first, BLOCK_M).to(tl.int32)
        b_dot = tl.zeros([ROWS, BLOCK_N], tl.float32)
        b_square = tl.zeros([ROWS, BLOCK_N], tl.float32)
        b_p_dot = tl.zeros([ROWS], tl.float32)
        b_p_square = tl.zeros([ROWS], tl.float32)
        for i in tl.range(0, n_here):
            i_token = i_first + i
            b_length = tl.zeros([BLOCK_N], tl.float32)
            b_p_length = tl.zeros([1], tl.float32)
            for i_col in tl.range(0, D, BLOCK_D):
                n_cols = D - i_col
                p_block = p_v + i_token * s_token + i_col
                b_v = load_rows(p_block, s_block, n_blocks, n_cols, BLOCK_N, BLOCK_D, EXACT)  # [BLOCK_N, BLOCK_D]
                b_length += tl.sum(b_v * b_v, axis=1)
                if p_prefix is not None:
                    b_p = load_rows(p_prefix + i_token * s_prefix + i_col, 0, 1, n_cols, 1, BLOCK_D, EXACT)  # [1, BLOCK_D]
                    b_p_length += tl.sum(b_p * b_p, axis=1)
                for q in tl.static_range(Q):
                    b_g = load_rows(p_query + q * D + i_col, 0, 1, n_cols, 1, BLOCK_D, EXACT)  # [1, BLOCK_D]
                    b_dot = add_row(b_dot, tl.sum(b_v * b_g, axis=1), i * Q + q, ROWS)
                    if p_prefix is not None:
                        b_p_dot = add_number(b_p_dot, tl.sum(b_p * b_g, axis=1), i * Q + q, ROWS)
            for q in tl.static_range(Q):
                b_square = add_row(b_square, b_length, i * Q + q, ROWS)
                b_p_square = add_number(b_p_square, b_p_length, i * Q + q, ROWS)
        b_weight, b_p_weight = weights_of_sources(
            b_dot, b_square, b_p_dot, b_p_square, p_score, p_rstd, p_prefix, i_first * Q, n_here * Q, n_blocks, eps,
            D, ROWS, BLOCK_N
        )  # fmt: skip
        for i in tl.range(0, n_here):
            i_token = i_first + i
            for i_col in tl.range(0, D, BLOCK_D):
                n_cols = D - i_col
                p_block = p_v + i_token * s_token + i_col
                b_v = load_rows(p_block, s_block, n_blocks, n_cols, BLOCK_N, BLOCK_D, EXACT)
                if p_prefix is not None:
                    b_p = load_rows(p_prefix + i_token * s_prefix + i_col, 0, 1, n_cols, 1, BLOCK_D, EXACT)
                for q in tl.static_range(Q):
                    b_h = tl.sum(b_v * pick_row(b_weight, i * Q + q, ROWS)[:, None], axis=0)[None, :]  # [1, BLOCK_D]
                    if p_prefix is not None:
                        b_h += b_p * pick_number(b_p_weight, i * Q + q, ROWS)[:, None]
                    p_row = p_h + (tl.cast(n_tokens, tl.int64) * q + i_token) * D + i_col
                    store_rows(p_row, 0, b_h, 1, n_cols, 1, BLOCK_D, EXACT)


@triton.jit(do_not_specialize=["n_blocks", "n_tokens"])
def attn_res_keys_backward_kernel(
    # read: the gradient of h, contiguous [Q, n_tokens, D]; as of attn_res_keys_kernel
    p_dh, p_v, p_prefix, p_query, p_score, p_rstd,
    # written: gradients of the blocks [n_tokens, n_blocks, D] and of the prefix (None: not needed); fp32 [tiles, Q, D],
    # partial sums of dg (None: not needed)
    p_dv, p_dprefix, p_dg,
    n_blocks, n_tokens, s_block, s_token, s_prefix,
    D: tl.constexpr, Q: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,  # >= BLOCK_M * Q
):  # fmt: skip
    """Gradients of blocks and prefix, and partial sums of dg; sources and gradients of h come from memory once."""
    # lint: allow short-transfer: all blocks of a token come at once, in equal pieces of columns; statistics are few numbers
    # lint: allow strided-transfer: the prefix's statistics stand behind those of the blocks
    # lint: allow unaligned-rows: statistics have as many columns as there are sources; rows are as wide as the caller's
    # lint: allow fill-in-loop: where the padding of such rows takes part in a sum, it has to be zero
    EXACT: tl.constexpr = D % BLOCK_D == 0
    s_query = tl.cast(n_tokens, tl.int64) * D
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n_tokens, BLOCK_M), tl.num_programs(0)):
        i_first = i_tile.to(tl.int64) * BLOCK_M
        n_here = tl.minimum(n_tokens - i_first, BLOCK_M).to(tl.int32)
        b_e = tl.zeros([ROWS, BLOCK_N], tl.float32)
        b_p_e = tl.zeros([ROWS], tl.float32)
        for i in tl.range(0, n_here):
            i_token = i_first + i
            for i_col in tl.range(0, D, BLOCK_D):
                n_cols = D - i_col
                p_block = p_v + i_token * s_token + i_col
                b_v = load_rows(p_block, s_block, n_blocks, n_cols, BLOCK_N, BLOCK_D, EXACT)  # [BLOCK_N, BLOCK_D]
                if p_prefix is not None:
                    b_p = load_rows(p_prefix + i_token * s_prefix + i_col, 0, 1, n_cols, 1, BLOCK_D, EXACT)  # [1, BLOCK_D]
                for q in tl.static_range(Q):
                    p_row = p_dh + s_query * q + i_token * D + i_col
                    b_dh = load_rows(p_row, 0, 1, n_cols, 1, BLOCK_D, EXACT)  # [1, BLOCK_D]
                    b_e = add_row(b_e, tl.sum(b_v * b_dh, axis=1), i * Q + q, ROWS)
                    if p_prefix is not None:
                        b_p_e = add_number(b_p_e, tl.sum(b_p * b_dh, axis=1), i * Q + q, ROWS)
        b_a, b_c, b_k, b_p_a, b_p_c, b_p_k = factors_of_gradients(
            b_e, b_p_e, p_score, p_rstd, p_prefix, i_first * Q, n_here * Q, n_blocks, D, ROWS, BLOCK_N
        )
        for i_col in tl.range(0, D, BLOCK_D):
            n_cols = D - i_col
            b_dg = tl.zeros([Q, BLOCK_D], tl.float32)
            for i in tl.range(0, n_here):
                i_token = i_first + i
                p_block = p_v + i_token * s_token + i_col
                b_v = load_rows(p_block, s_block, n_blocks, n_cols, BLOCK_N, BLOCK_D, EXACT)
                b_sum = pick_row(b_k, i * Q, ROWS)  # k, [BLOCK_N]
                for q in tl.static_range(1, Q):
                    b_sum += pick_row(b_k, i * Q + q, ROWS)
                b_dv = b_v * -b_sum[:, None]
                if p_prefix is not None:
                    b_p = load_rows(p_prefix + i_token * s_prefix + i_col, 0, 1, n_cols, 1, BLOCK_D, EXACT)
                    b_sum = pick_number(b_p_k, i * Q, ROWS)  # [1]
                    for q in tl.static_range(1, Q):
                        b_sum += pick_number(b_p_k, i * Q + q, ROWS)
                    b_dp = b_p * -b_sum[:, None]
                for q in tl.range(0, Q):
                    b_g = load_rows(p_query + q * D + i_col, 0, 1, n_cols, 1, BLOCK_D, EXACT)
                    b_dh = load_rows(p_dh + s_query * q + i_token * D + i_col, 0, 1, n_cols, 1, BLOCK_D, EXACT)
                    b_factor = pick_row(b_c, i * Q + q, ROWS)[:, None]
                    b_dv += b_g * b_factor + b_dh * pick_row(b_a, i * Q + q, ROWS)[:, None]
                    b_part = tl.sum(b_v * b_factor, axis=0)[None, :]  # of dg, [1, BLOCK_D]
                    if p_prefix is not None:
                        b_factor = pick_number(b_p_c, i * Q + q, ROWS)[:, None]
                        b_dp += b_g * b_factor + b_dh * pick_number(b_p_a, i * Q + q, ROWS)[:, None]
                        b_part += b_p * b_factor
                    if p_dg is not None:
                        b_dg += tl.where(is_number(q, Q)[:, None], b_part, 0.0)
                if p_dv is not None:
                    p_row = p_dv + i_token * n_blocks * D + i_col
                    store_rows(p_row, D, b_dv, n_blocks, n_cols, BLOCK_N, BLOCK_D, EXACT)
                if p_dprefix is not None:
                    store_rows(p_dprefix + i_token * D + i_col, 0, b_dp, 1, n_cols, 1, BLOCK_D, EXACT)
            if p_dg is not None:
                p_partial = p_dg + i_tile.to(tl.int64) * Q * D + i_col
                store_rows(p_partial, D, b_dg, Q, n_cols, Q, BLOCK_D, EXACT)


MAX_BLOCKS = 64
_BLOCK_M = 8  # tokens of a turn, of which a backward stores one partial sum [Q, D]: an eighth of a row a token
_COLUMN_BYTES = 8 * 1024  # of a row's transfer
# Bytes of Unified Buffer for every element of a tile [blocks, columns], of [queries, columns] and of a row of columns; tests
# compile such tiles. Where one needed more than there is, CANN 9.0 compiled for over 15 minutes, CANN 9.1 for over 10.
_BYTES = {"forward": (24, 0, 0), "backward": (20, 15, 36), "backward of many": (20, 20, 36)}
_MANY = 5  # queries or more


@dataclass(frozen=True, kw_only=True, repr=False)
class KeysTiling(CountTiling):
    """A tile of the sources of a token; a program takes `per_program` tokens a turn.

    Attributes:
        task: "forward" or "backward".
    """

    task: str

    def __repr__(self) -> str:
        """As warnings name it."""
        tile = f"{self.constants['BLOCK_N']} x {self.constants['BLOCK_D']}"
        return f"kernel={self.task}, tile={tile}, {self.per_program} tokens"

    @property
    def ub_bytes(self) -> int:
        """Declared bytes of Unified Buffer."""
        return footprint(_tiles(self.task, self.constants), {}, self.device)

    def partials(self, n_tokens: int) -> int:
        """Partial sums of dg that a backward stores: one a turn."""
        return ceil(n_tokens / self.per_program)

    def smaller(self) -> "KeysTiling | None":
        """Half of the columns, for a compiler that needs more memory on chip than was declared; None at the end."""
        unit, columns = self.device.ub_align // 2, self.constants["BLOCK_D"]
        if columns <= unit:
            return None
        blocks = tuple({**self.constants, "BLOCK_D": round_up(ceil(columns / 2), unit)}.items())
        return dataclasses.replace(self, blocks=blocks, why="the compiler refused a larger tile")


def _tiles(task: str, blocks: Mapping[str, Any]) -> list[Tile]:
    is_of_many = task == "backward" and blocks["Q"] >= _MANY
    of_sources, of_queries, of_row = _BYTES["backward of many" if is_of_many else task]
    return [
        Tile("sources", (blocks["BLOCK_N"], blocks["BLOCK_D"]), of_sources),
        Tile("queries", (blocks["Q"], blocks["BLOCK_D"]), of_queries),
        Tile("a row", (1, blocks["BLOCK_D"]), of_row),
        Tile("statistics", (blocks["ROWS"], round_up(blocks["BLOCK_N"], 8)), FP32, 10),
    ]


def choose(task: str, call: Keys | KeysBackward, device: Device) -> KeysTiling | None:
    """The most columns of all sources that fit, in equal pieces; None where none do."""
    n_blocks, (n_queries, width) = call.bank.shape[-2], call.query.shape
    if n_blocks > MAX_BLOCKS:
        return None
    itemsize = max(each.dtype.itemsize for each in (call.bank, call.prefix) if each is not None)
    unit = device.ub_align // 2
    padded = round_up(width, unit)
    blocks: dict[str, Any] = {"D": width, "Q": n_queries, "BLOCK_M": _BLOCK_M, "ROWS": _BLOCK_M * n_queries}
    blocks |= {"BLOCK_N": round_up(max(1, n_blocks), 2), "BLOCK_D": "COLUMNS"}
    columns = Block("COLUMNS", min(padded, _COLUMN_BYTES // itemsize), unit, unit)
    try:
        largest = fit(_tiles(task, blocks), (columns,), device)["COLUMNS"]
    except UnifiedBufferError:
        return None
    blocks["BLOCK_D"] = equal_blocks(padded, largest, unit)
    return KeysTiling(
        task=task,
        device=device,
        blocks=tuple(blocks.items()),
        per_program=_BLOCK_M,
        per_core=1,
        why=f"{blocks['BLOCK_D']} of {width} columns: the most of all {call.n_sources} sources that fit, in equal pieces",
        decided_at=here(),
    )


def keys(p: Plan, call: Keys) -> tuple[Any, ...]:
    """h [Q, ..., D], s and r [T, Q, sources]; None for s and r unless `save`."""
    wanted = call.results()
    if 0 in call.bank.shape[:-2]:
        return tuple(p.new(each) for each in wanted.values())
    tiling = _choose(p, "forward", call)
    if tiling is None:
        made: tuple[Any, ...] = p.torch(compute_keys, call, makes=[*wanted.values()])
        return made
    sources, sizes = _sources(p, call)
    results = {name: p.new(each) for name, each in wanted.items()}
    p.launch(
        cuda.attn_res_keys_kernel if p.chip.kind == "cuda" else attn_res_keys_kernel,
        _NAMES["forward"],
        tiling.grid(sizes["n_tokens"]),
        reads=sources | p.fields(call, "query"),
        writes={f"p_{name}": each for name, each in results.items()},
        sizes={**sizes, "eps": call.eps},
    )
    return tuple(results.values())


def keys_backward(p: Plan, call: KeysBackward) -> tuple[Any, ...]:
    """The gradients of the bank, the prefix and the queries; None for those that are not needed."""
    wanted = call.results()
    if 0 in call.bank.shape[:-2]:
        return tuple(zero(p, p.new(each)) for each in wanted.values())
    tiling = _choose(p, "backward", call)
    if tiling is None:
        made: tuple[Any, ...] = p.torch(compute_keys_backward, call, makes=[*wanted.values()])
        return made
    sources, sizes = _sources(p, call)
    dbank, dprefix, dquery = (p.new(each) for each in wanted.values())
    n_tokens = sizes["n_tokens"]
    partials = None if dquery is None else p.new(Empty((tiling.partials(n_tokens), *call.query.shape), call.query.dtype))
    p.launch(
        cuda.attn_res_keys_backward_kernel if p.chip.kind == "cuda" else attn_res_keys_backward_kernel,
        _NAMES["backward"],
        tiling.grid(n_tokens),
        reads=sources | p.fields(call, "dh", "query", "score", "rstd"),
        writes={"p_dv": dbank if dbank is not None and dbank.numel() else None, "p_dprefix": dprefix, "p_dg": partials},
        sizes=sizes,
    )
    if partials is not None:
        add_partials(p, "sum of dquery", partials, dquery)
    return dbank, dprefix, dquery


_NAMES = {"forward": "attn_res_keys forward", "backward": "attn_res_keys backward"}


def _choose(p: Plan, task: str, call: Keys | KeysBackward) -> Any:
    chosen = (cuda.choose if p.chip.kind == "cuda" else choose)(task, call, p.chip)
    return None if chosen is None else p.decide(_NAMES[task], chosen)


def _sources(p: Plan, call: Any) -> tuple[dict[str, Any], dict[str, int]]:
    """Pointers to the sources, and sizes and strides. Blocks lie at one stride, and tokens do; others are copied."""
    bank, prefix = call.bank, at_one_stride(p, call.prefix)
    *leading, n_blocks, width = bank.shape
    # From one token to the next: 0 where there are no elements.
    rows = 0 if 0 in bank.shape else row_stride((*leading, width), (*bank.strides[:-2], bank.strides[-1]))
    if rows is None or bank.strides[-2] * n_blocks > INT32_END:  # offsets in a tile have 32 bits
        bank = p.contiguous(bank)
        rows = n_blocks * width
    pointers = {"p_v": bank if n_blocks else prefix, "p_prefix": prefix}
    sizes = {"n_blocks": n_blocks, "n_tokens": prod(leading), "s_block": bank.strides[-2], "s_token": rows}
    return pointers, sizes | strides_of(prefix=prefix)
