"""`attn_res` and its gradient."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from npu_tiling import device_for
from npu_tiling.pytorch.tensors import allocate, allocate_like, statistics_dtype
from torch import Tensor

from .. import reference
from ..launch import single
from ..launch.sources import sources_and_prefix
from ..passes import TorchPasses
from ..reference import Statistics, Weights
from .library import OPERATORS, SAVED, STATISTICS, WEIGHTS, allocate_gradients, fake_gradients, gradient_of_h


class Call(NamedTuple):
    """The arguments of `attn_res`, in the operator's order.

    Attributes:
        blocks: N sources, or `stacked`, one tensor of N.
        n_blocks: how many of those count.
        counted: the same on the device, or None.
        prefix: one more source, or None.
        layer_output: what is added to the prefix, or None.
        dtype: of h; None: the sources'.
        save: whether a backward will follow.
    """

    blocks: Sequence[Tensor]
    stacked: bool
    n_blocks: int
    counted: Tensor | None
    prefix: Tensor | None
    layer_output: Tensor | None
    query: Tensor
    rms_weight: Tensor
    output_rms_weight: Tensor | None
    eps: float
    norm_eps: float
    dtype: torch.dtype | None
    save: bool

    @property
    def weights(self) -> Weights:
        return Weights(self.query, self.rms_weight, self.output_rms_weight)

    @property
    def like(self) -> Tensor:
        """The prefix, or without one the first block: h is on its device, and has its dtype unless `dtype` says another."""
        return self.blocks[0] if self.prefix is None else self.prefix

    @property
    def shape(self) -> torch.Size:
        """The shape of h."""
        return self.like.shape[1:] if self.stacked and self.prefix is None else self.like.shape


def attn_res(*arguments: Any) -> tuple[Tensor | None, ...]:
    call = Call(*arguments)
    return _forward(call, single.Update(call.layer_output, _allocate_joined(call), append=False))


def attn_res_update(*arguments: Any) -> tuple[Tensor | None, ...]:
    *given, append, in_place = arguments
    call = Call(*given)
    joined = call.prefix if in_place and call.layer_output is not None else _allocate_joined(call)
    h, y, joined, *statistics = _forward(call, single.Update(call.layer_output, joined, append))
    return h, y, None if in_place else joined, *statistics


def _allocate_joined(call: Call) -> Tensor | None:
    """Memory for the prefix with the layer's output."""
    if call.prefix is None or call.layer_output is None:
        return None
    return allocate(call.prefix, call.prefix.shape, call.prefix.dtype)


def _forward(call: Call, update: single.Update) -> tuple[Tensor | None, ...]:
    """h and y [..., D], the new prefix, and the statistics; None for what was not asked for."""
    shape, weights, dtype = call.shape, call.weights, call.dtype or call.like.dtype
    device, results, joined = device_for(call.like.device), None, update.joined
    if device is not None:
        sources = sources_and_prefix(*call[:5], device)
        results = single.forward(sources, weights, call.eps, call.norm_eps, dtype, call.save, device, update)
    if results is None:
        prefix = _updated(call, update)
        joined = None if update.joined is None else prefix
        used = call.n_blocks if call.counted is None else None
        passes = TorchPasses(call.blocks, call.stacked, n_blocks=used, count=call.counted, prefix=prefix)
        results = reference.forward(passes, weights, call.eps, call.norm_eps, dtype)
    h, y, statistics = results
    y = None if y is None else y.view(shape)
    return h.view(shape), y, joined, *(statistics if call.save else (None, None, None, None))


def _updated(call: Call, update: single.Update) -> Tensor | None:
    """The prefix with the layer's output, after it was appended where that is asked for."""
    prefix = call.prefix
    if prefix is not None and update.x is not None:
        wide = statistics_dtype(torch.promote_types(prefix.dtype, update.x.dtype))
        total = (prefix.to(wide) + update.x.to(wide)).to(prefix.dtype)
        prefix = prefix.copy_(total) if update.joined is prefix else total.contiguous()
    if update.append:
        assert prefix is not None
        append_block(call.blocks[0], call.n_blocks, call.counted, prefix)
    return prefix


def append_block(blocks: Tensor, n_blocks: int, count: Tensor | None, block: Tensor) -> None:
    """Writes a block behind the first n_blocks of [capacity, ..., D], or behind `count`, where there is room."""
    if count is None:
        blocks[n_blocks].copy_(block)
        return
    here = torch.arange(len(blocks), device=count.device).view(-1, *(1,) * block.dim()) == count.clamp(min=0)
    blocks.copy_(torch.where(here, block.to(blocks.dtype), blocks))


def attn_res_backward(
    dh: Tensor | None,
    dy: Tensor | None,
    djoined: Tensor | None,
    h: Tensor | None,
    blocks: Sequence[Tensor],
    stacked: bool,
    n_blocks: int,
    count: Tensor | None,
    prefix: Tensor | None,
    query: Tensor,
    rms_weight: Tensor,
    output_rms_weight: Tensor | None,
    score: Tensor,
    rstd: Tensor,
    lse: Tensor,
    norm_rstd: Tensor | None,
    need_blocks: Sequence[bool],
    need_prefix: bool,
    need_weights: Sequence[bool],
) -> tuple[list[Tensor | None], Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    weights, statistics = Weights(query, rms_weight, output_rms_weight), Statistics(score, rstd, lse, norm_rstd)
    needed = (need_weights[0], need_weights[1])
    device = device_for(score.device)
    dh, dweight = gradient_of_h(dh, dy, h, weights, statistics, need_weights[2])
    if device is not None:
        gradients = allocate_gradients(blocks, need_blocks)
        if stacked and gradients[0] is not None and prefix is not None:
            (gradients[0] if count is not None else gradients[0][n_blocks:]).zero_()  # of what lies behind the blocks
        dprefix = None
        if prefix is not None and need_prefix:
            dprefix = allocate_like(prefix)
        sources = sources_and_prefix(blocks, stacked, n_blocks, count, prefix, device, gradients)
        unrounded = h if h is not None and reads_h(h) else None
        added = None if dprefix is None else djoined
        dweights = single.backward(sources, dh, unrounded, weights, statistics, needed, device, added, dprefix)
        if dweights is not None:
            return gradients, dprefix, *dweights, dweight
    used = n_blocks if count is None else None
    sources_of = functools.partial(TorchPasses, prefix=prefix, need_prefix=need_prefix, djoined=djoined)
    passes = sources_of(blocks, stacked, need_blocks, n_blocks=used, count=count)
    dquery, dnorm = reference.backward(passes, dh, weights, statistics, needed)
    return passes.dv, passes.dprefix, dquery, dnorm, dweight


def reads_h(h: Tensor) -> bool:
    """Whether the backward takes delta from h: where h is not rounded, on Ascend; elsewhere it sums delta up again."""
    if h.dtype != torch.float32:
        return False
    device = device_for(h.device)
    return device is not None and device.kind == "ascend"


def _fake(*arguments: Any) -> tuple[Tensor | None, ...]:
    call = Call(*arguments)
    like, shape = call.like, call.shape
    n_tokens, n_rows = prod(shape[:-1]), call.n_blocks + int(call.prefix is not None)
    h = like.new_empty(shape, dtype=call.dtype or like.dtype)
    y = None if call.output_rms_weight is None else torch.empty_like(h)
    joined = _allocate_joined(call)
    if not call.save:
        return h, y, joined, None, None, None, None
    dtypes = [source.dtype for source in (*call.blocks, call.prefix) if source is not None]
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    shapes = ((n_rows, n_tokens), (n_rows, n_tokens), (n_tokens,))
    norm_rstd = None if y is None else like.new_empty((n_tokens,), dtype=dtype)
    score, rstd, lse = (like.new_empty(shape, dtype=dtype) for shape in shapes)
    device = device_for(like.device)
    sources = call.blocks[0] if len(call.blocks) else like
    if device is not None and single.keeps_by_token(
        sources, h.dtype, int(shape[-1]), n_rows, device, prefix=call.prefix is not None
    ):
        score, rstd = (like.new_empty(shapes[0][::-1], dtype=dtype).t() for _ in range(2))
    return h, y, joined, score, rstd, lse, norm_rstd


def _fake_update(*arguments: Any) -> tuple[Tensor | None, ...]:
    *given, _, in_place = arguments
    h, y, joined, *statistics = _fake(*given)
    return h, y, None if in_place else joined, *statistics


def _fake_backward(  # type: ignore[no-untyped-def]
    dh, dy, djoined, h, blocks, stacked, n_blocks, count, prefix, query, rms_weight, output_rms_weight, *rest
):
    need_blocks, need_prefix, need_weights = rest[-3:]
    weights = (query, rms_weight, query if output_rms_weight is None else output_rms_weight)
    dprefix = prefix.new_empty(prefix.shape) if need_prefix else None
    return fake_gradients(blocks, need_blocks), dprefix, *fake_gradients(weights, need_weights)


_SOURCES = "bool stacked, SymInt n_blocks, Tensor? count"
_OPTIONS = f"{WEIGHTS}, float eps, float norm_eps, ScalarType? dtype, bool save"
OPERATORS.define(
    f"attn_res(Tensor[] blocks, {_SOURCES}, Tensor? prefix, Tensor? layer_output, {_OPTIONS}) -> (Tensor h, Tensor y,"
    f" Tensor joined, {STATISTICS})",
    attn_res,
    _fake,
    forward_mode=True,
    batched=attn_res,
)
OPERATORS.define(
    f"attn_res_update(Tensor(a!)[] blocks, {_SOURCES}, Tensor(b!) prefix, Tensor? layer_output, {_OPTIONS}, bool append,"
    f" bool in_place) -> (Tensor h, Tensor y, Tensor joined, {STATISTICS})",
    attn_res_update,
    _fake_update,
)
OPERATORS.define(
    f"attn_res_backward(Tensor? dh, Tensor? dy, Tensor? djoined, Tensor? h, Tensor[] blocks, {_SOURCES}, Tensor? prefix,"
    f" {WEIGHTS}, {SAVED}, bool[] need_blocks, bool need_prefix, bool[] need_weights) -> (Tensor[] dblocks,"
    " Tensor dprefix, Tensor dquery, Tensor drms_weight, Tensor doutput_rms_weight)",
    attn_res_backward,
    _fake_backward,
    forward_mode=True,
    batched=attn_res_backward,
)
