"""Checks of the public functions' arguments, and their calls on DTensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from npu_tiling import arguments
from npu_tiling.dispatch import holds, is_autocast, is_certain
from npu_tiling.dtensor import Shards, is_distributed, moved, summed
from npu_tiling.rows import may_overlap, row_stride
from torch import Tensor
from torch.nn import ParameterList

from .records import AttnResResult

Triple: TypeAlias = tuple[Any, Any, Any]  # query, rms_weight and output_rms_weight; or rms_eps, scale and output_rms_eps


def as_blocks(blocks: Any) -> Any:
    """A list of blocks, of whatever kind, as a list or tuple; anything else as it is, for the checks to refuse.

    Under autocast, blocks of several dtypes become the widest of them, as `torch.stack` takes them there.
    """
    if not isinstance(blocks, (list, tuple)):
        if isinstance(blocks, (str, Tensor)) or not isinstance(blocks, (Sequence, ParameterList)):
            return blocks
        blocks = list(blocks)
    if blocks and isinstance(blocks[0], Tensor) and is_autocast(blocks[0]):
        dtypes = {block.dtype for block in blocks if isinstance(block, Tensor) and block.is_floating_point()}
        if len(dtypes) > 1:
            widest = functools.reduce(torch.promote_types, dtypes)
            floating = (isinstance(block, Tensor) and block.is_floating_point() for block in blocks)
            blocks = [block.to(widest) if casts else block for block, casts in zip(blocks, floating, strict=True)]
    return blocks


def count_blocks(blocks: Any, *, stacked: bool) -> int:
    """How many blocks there are, stacked or listed; 0 of what the checks will refuse."""
    if stacked:
        return blocks[0].shape[0] if blocks[0].dim() and not blocks[0].is_nested else 0
    return len(blocks) if isinstance(blocks, (list, tuple)) else 0


def check_sources(blocks: Any, stacked: bool, weights: Triple, numbers: Triple) -> tuple[float, float, float]:
    """Blocks and the weights [D] that go with them; returns rms_eps, scale and output_rms_eps, as floats."""
    first = check_blocks(blocks, stacked)
    _check_weights(*weights, first, "the residuals'")
    return _check_numbers(*numbers)


def check_phase1(
    queries: Any, blocks: Any, stacked: bool, rms_weight: Any, rms_eps: Any, scale: Any
) -> tuple[Tensor, float, float]:
    """The arguments of `attn_res_phase1`; returns one block, or all of them stacked, rms_eps and scale."""
    first = check_blocks(blocks, stacked)
    width = first.shape[-1]
    arguments.floating("queries", queries)
    n_layers = queries.shape[0] if queries.dim() == 2 else 0
    if not n_layers:
        raise ValueError(f"queries has shape {tuple(queries.shape)} and must have shape (S, {width}) with S at least 1.")
    arguments.parameter("queries", queries, ((n_layers, width),), first, "the residuals'")
    arguments.parameter("rms_weight", rms_weight, ((width,), (n_layers, width)), first, "the residuals'")
    return first, *_check_numbers(rms_eps, scale, None)[:2]


def check_merge(
    state: Mapping[str, Any], prefix: Any, layer_output: Any, weights: Triple, numbers: Triple
) -> tuple[float, float, float]:
    """The arguments of `attn_res_merge`; returns rms_eps, scale and output_rms_eps, as floats."""
    arguments.rows("prefix", prefix)
    wide = torch.float64 if prefix.dtype == torch.float64 else torch.float32
    for name, tensor in state.items():
        shape = prefix.shape if name == "o" else prefix.shape[:-1]
        check_like(name, tensor, shape, wide, prefix)
    _check_layer_output(layer_output, prefix)
    _check_weights(*weights, prefix, "the prefix's")
    return _check_numbers(*numbers)


def _check_layer_output(layer_output: Any, prefix: Tensor) -> None:
    if layer_output is not None:
        check_rows_like("layer_output", layer_output, prefix, "prefix's")


def _check_weights(query: Any, rms_weight: Any, output_rms_weight: Any, like: Tensor, of: str) -> None:
    shapes = (like.shape[-1:],)
    arguments.parameter("query", query, shapes, like, of)
    arguments.parameter("rms_weight", rms_weight, shapes, like, of)
    if output_rms_weight is not None:
        arguments.parameter("output_rms_weight", output_rms_weight, shapes, like, of, or_none=True)


def _check_numbers(rms_eps: Any, scale: Any, output_rms_eps: Any) -> tuple[float, float, float]:
    eps = arguments.number("rms_eps", rms_eps, least=0, finite=False)
    number: float = scale if type(scale) is float and scale == 1.0 else arguments.number("scale", scale)
    if output_rms_eps is None:
        return eps, number, eps
    return eps, number, arguments.number("output_rms_eps", output_rms_eps, least=0, finite=False)


def check_bank(
    bank: Any,
    n_blocks: Any,
    prefix: Any,
    layer_output: Any,
    weights: Triple,
    numbers: Triple,
    flags: Mapping[str, bool],
    output_dtype: Any,
) -> tuple[float, float, float]:
    """The arguments of `attn_res_bank`; returns rms_eps, scale and output_rms_eps, as floats."""
    arguments.flags(**flags)
    arguments.rows("prefix", prefix)
    n_all = _check_bank_blocks(bank, prefix)
    _check_count(n_blocks, n_all, prefix)
    _check_layer_output(layer_output, prefix)
    _check_weights(*weights, prefix, "the prefix's")
    if output_dtype is not None:
        check_output_dtype(output_dtype)
    if flags["append"]:
        _check_append(bank, n_blocks, n_all)
    if flags["in_place"]:
        _check_rows("prefix", prefix, prefix, "written in place")
    return _check_numbers(*numbers)


def check_written(written: Mapping[str, Any]) -> None:
    """A bank and a prefix that a call is to write to and autograd is to record, by the option that says so."""
    for option, tensor in written.items():
        first = tensor._base if tensor._is_view() else tensor
        if is_distributed((tensor,)) or (first.is_leaf and first.requires_grad):
            what = "DTensors" if is_distributed((tensor,)) else "leaves that require a gradient and views of them"
            raise ValueError(f"{option} is True and must be False for {what}: autograd cannot record what is written there.")


def _check_bank_blocks(bank: Any, prefix: Tensor) -> int:
    """A bank beside a prefix, or a list of blocks; returns how many blocks there may be."""
    if isinstance(bank, Tensor):
        arguments.floating("bank", bank)
        capacity = bank.shape[-2] if bank.dim() > 1 else 0
        arguments.shape("bank", bank, (*prefix.shape[:-1], capacity, prefix.shape[-1]))
        arguments.device("bank", bank, prefix, "prefix's")
        return capacity
    if not isinstance(bank, (list, tuple)):
        raise TypeError(f"bank is a {type(bank).__name__} and must be a tensor, or a list of tensors.")
    for i, block in enumerate(bank):
        arguments.floating(f"bank[{i}]", block)
        check_like(f"bank[{i}]", block, prefix.shape, bank[0].dtype, prefix)
    return len(bank)


def _check_count(n_blocks: Any, n_all: int, prefix: Tensor) -> None:
    if isinstance(n_blocks, Tensor):
        arguments.dtype("n_blocks", n_blocks, torch.int32, torch.int64)
        arguments.shape("n_blocks", n_blocks, (), (1,))
        arguments.device("n_blocks", n_blocks, prefix, "prefix's")
        return
    arguments.whole("n_blocks", n_blocks, least=0, or_none=True)
    if n_blocks is not None and n_blocks > n_all:
        raise ValueError(f"n_blocks is {n_blocks} and must be at most the blocks there are, {n_all}.")


def _check_append(bank: Any, n_blocks: Any, n_all: int) -> None:
    if not isinstance(bank, Tensor):
        raise ValueError("append is True and must be False for a list of blocks, which the caller appends to.")
    if not isinstance(n_blocks, Tensor) and (n_blocks is None or n_blocks >= n_all):
        raise ValueError(f"append is True and must be False for a bank that is full: it has {n_all} blocks.")
    _check_rows("bank", bank, bank.movedim(-2, 0)[0], "appended to")


def _check_rows(name: str, written: Tensor, rows: Tensor, how: str) -> None:
    """A tensor to be written to, of which `rows` are a part, or all: no two of them share memory."""
    certain = is_certain if torch.compiler.is_compiling() else bool
    if row_stride(rows.shape, rows.stride(), certain) is None or may_overlap(written, certain):
        raise ValueError(
            f"{name} has strides {written.stride()} and must have rows of their own, at one stride, to be {how}."
        )


def check_blocks(blocks: Any, stacked: bool) -> Tensor:
    """`blocks`, a list of one stacked tensor or of every block; returns the first."""
    if not isinstance(blocks, (list, tuple)):
        raise TypeError(f"residuals is a {type(blocks).__name__} and must be a tensor, or a list of tensors.")
    if not blocks:
        raise ValueError("residuals is empty and must have at least one block.")
    first = blocks[0]
    if stacked:
        arguments.rows("residuals", first)
        if first.dim() < 2 or not holds(first.shape[0] >= 1):
            raise ValueError(f"residuals has shape {tuple(first.shape)} and must have shape (N, ..., D) with N at least 1.")
        return first
    arguments.rows("residuals[0]", first)
    shape, dtype, device = first.shape, first.dtype, first.device
    for i, block in enumerate(blocks):
        is_dense = isinstance(block, Tensor) and block.layout is torch.strided and not block.is_nested
        is_alike = is_dense and not torch.compiler.is_compiling()  # which takes sizes that depend on data below
        if not (is_alike and block.shape == shape and block.dtype == dtype and block.device == device):
            check_like(f"residuals[{i}]", block, shape, dtype, first, of="residuals[0]'s")
    return first


def check_like(
    name: str, tensor: Any, shape: Sequence[int], dtype: torch.dtype, like: Tensor, of: str = "the prefix's"
) -> None:
    """A tensor of one shape, dtype and device."""
    arguments.shape(name, tensor, shape)
    arguments.dtype(name, tensor, dtype)
    arguments.device(name, tensor, like, of)


def check_rows_like(name: str, tensor: Any, like: Tensor, of: str) -> None:
    """A floating tensor of any dtype, of the shape and on the device of another."""
    arguments.floating(name, tensor)
    arguments.shape(name, tensor, like.shape)
    arguments.device(name, tensor, like, of)


def check_output_dtype(dtype: Any) -> None:
    """A floating dtype."""
    if dtype not in (*arguments.DTYPES, torch.float64):
        allowed = "torch.float32, torch.bfloat16, torch.float16, on a CPU torch.float64, or None"
        raise TypeError(f"output_dtype is {dtype} and must be {allowed}.")


_WEIGHTS = ("query", "rms_weight", "output_rms_weight")


# DTensors: tokens may be split in any way, all blocks alike; the other dimensions may not. Nothing is sent. The gradients of
# the weights are, on each rank, sums over its own tokens: `Partial`, as from torch's norms.


def attn_res_of_parts(
    run: Callable[..., Tensor | AttnResResult], residuals: Tensor | Sequence[Tensor], weights: Sequence[Tensor | None]
) -> Tensor | AttnResResult:
    """`run(residuals, *weights)` on each rank's own tokens."""
    placed = _Blocks(residuals, dict(zip(_WEIGHTS, weights, strict=True)))
    result = run(placed.local(), *[placed.shards.local(name, placed.gradient) for name in _WEIGHTS])
    if isinstance(result, Tensor):
        return placed.wrap(result, 0, placed.shape)
    return _wrapped(result, placed.shards, placed.of_tokens, placed.shape)


def phase1_of_parts(
    run: Callable[..., tuple[Tensor, ...]], queries: Tensor, residuals: Tensor | Sequence[Tensor], rms_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """`run(queries, residuals, rms_weight)` on each rank's own tokens."""
    placed = _Blocks(residuals, {"queries": queries, "rms_weight": rms_weight})
    local_queries, local_norm = (placed.shards.local(name, placed.gradient) for name in ("queries", "rms_weight"))
    o, lse = run(local_queries, placed.local(), local_norm)
    return placed.wrap(o, 1, (len(queries), *placed.shape)), placed.wrap(lse, 1, (len(queries), *placed.shape[:-1]))


def with_prefix_of_parts(
    run: Callable[..., AttnResResult],
    rows: Mapping[str, Tensor | None],
    weights: Sequence[Tensor | None],
    bank: Tensor | Sequence[Tensor] | None = None,
) -> AttnResResult:
    """`run` of rows, weights and the bank, by name, on each rank's own tokens; results lie as the prefix does."""
    blocks = {"bank": bank} if isinstance(bank, Tensor) else {f"bank[{i}]": block for i, block in enumerate(bank or ())}
    shards = Shards({**rows, **blocks, **dict(zip(_WEIGHTS, weights, strict=True))})
    placements = shards.rows("prefix")
    for name in (*rows, *blocks):
        shards.alike(name, placements, "prefix")
    shards.replicated(*_WEIGHTS)
    local = {name: shards.local(name, placements) for name in rows}
    local |= {name: shards.local(name, summed(placements)) for name in _WEIGHTS}
    if bank is not None:
        parts = [shards.local(name, placements) for name in blocks]
        local["bank"] = parts[0] if isinstance(bank, Tensor) else parts
    prefix = rows["prefix"]
    assert prefix is not None
    return _wrapped(run(**local), shards, placements, prefix.shape)


def _wrapped(result: AttnResResult, shards: Shards, placements: Sequence[Any], shape: Sequence[int]) -> AttnResResult:
    """Results of one rank as DTensors; rows [..., D] have these placements and this shape."""
    normalized, prefix = [None if part is None else shards.wrap(part, placements, shape) for part in result[1:3]]
    alpha = result.weights
    alpha = None if alpha is None else shards.wrap(alpha, moved(placements, 1), (len(alpha), *shape[:-1]))
    return AttnResResult(shards.wrap(result.output, placements, shape), normalized, prefix, alpha)


class _Blocks:
    """The blocks and what goes with them.

    Attributes:
        shards: all of them.
        shape: of one block, [..., D].
        of_tokens: placements of tensors [..., D].
        gradient: where the gradients of the weights are.
    """

    def __init__(self, blocks: Tensor | Sequence[Tensor], weights: Mapping[str, Tensor | None]) -> None:
        self._stacked = isinstance(blocks, Tensor)
        named = {"residuals": blocks} if isinstance(blocks, Tensor) else {f"residuals[{i}]": v for i, v in enumerate(blocks)}
        self.shards = Shards({**named, **weights})
        self._names = list(named)
        first = self._names[0]
        placements = self.shards.rows(first, int(self._stacked))
        for name in self._names[1:]:
            self.shards.alike(name, placements, first)
        self.shards.replicated(*weights)
        self.shape = named[first].shape[int(self._stacked) :]
        self.gradient = summed(placements)
        self._of_blocks = placements
        self.of_tokens = moved(placements, -1) if self._stacked else placements

    def local(self) -> Any:
        parts = [self.shards.local(name, self._of_blocks) for name in self._names]
        return parts[0] if self._stacked else parts

    def wrap(self, part: Tensor, leading: int, shape: Sequence[int]) -> Tensor:
        """A result with `leading` dimensions before those of the tokens."""
        return self.shards.wrap(part, moved(self.of_tokens, leading), shape)
