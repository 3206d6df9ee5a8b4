"""`phase1`, `merge` and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from npu_tiling import device_for
from npu_tiling.pytorch.tensors import statistics_dtype
from torch import Tensor

from .. import reference
from ..launch import two_phase
from ..launch.columns import KernelPasses
from ..launch.sources import follow
from ..passes import TorchPasses
from ..reference import State, Statistics, Weights
from . import library
from .library import OPERATORS, WEIGHTS, allocate_gradients, fake_gradients


def phase1(
    queries: Tensor, blocks: Sequence[Tensor], stacked: bool, rms_weight: Tensor, eps: float, save: bool
) -> tuple[Tensor | None, ...]:
    device = device_for(queries.device)
    score: Tensor | None
    rstd: Tensor | None
    if device is None:
        state, score, rstd = reference.phase1(TorchPasses(blocks, stacked), queries, rms_weight, eps)
    else:
        sources = follow(blocks, device, stacked=stacked)
        state, score, rstd = two_phase.phase1(sources, queries, rms_weight, eps, save, device)
    return state.o, state.lse.t().contiguous(), *((score, rstd) if save else (None, None))


def phase1_backward(
    do: Tensor | None,
    dlse: Tensor | None,
    queries: Tensor,
    blocks: Sequence[Tensor],
    stacked: bool,
    rms_weight: Tensor,
    score: Tensor,
    rstd: Tensor,
    need_blocks: Sequence[bool],
    need_weights: Sequence[bool],
) -> tuple[list[Tensor | None], Tensor | None, Tensor | None]:
    needed = (need_weights[0], need_weights[1])
    given = ((do, None if dlse is None else dlse.t()), queries, rms_weight, score, rstd, needed)
    device = device_for(score.device)
    if device is None:
        rows = TorchPasses(blocks, stacked, need_blocks)
        dweights = reference.phase1_backward(rows, *given)
        return rows.dv, *dweights
    gradients = allocate_gradients(blocks, need_blocks)
    if not score.numel():
        return gradients, torch.zeros_like(queries), torch.zeros_like(rms_weight)
    passes = KernelPasses(follow(blocks, device, gradients, stacked=stacked), device, need_dg=any(needed))
    return gradients, *reference.phase1_backward(passes, *given)


def merge(
    o: Tensor,
    lse: Tensor,
    partial: Tensor,
    x: Tensor | None,
    query: Tensor,
    rms_weight: Tensor,
    output_rms_weight: Tensor | None,
    eps: float,
    norm_eps: float,
    save: bool,
) -> tuple[Tensor | None, ...]:
    state, weights = State(o, lse), Weights(query, rms_weight, output_rms_weight)
    device = device_for(partial.device)
    if device is not None:
        h, y, joined, statistics = two_phase.merge(state, partial, x, weights, eps, norm_eps, save, device)
    else:
        h, y, joined, statistics = reference.merge(state, partial, x, weights, eps, norm_eps)
    score, rstd, _, norm_rstd = statistics
    kept = (score, rstd, norm_rstd) if save else (None, None, None)
    return tuple([library.contiguous(result) for result in (h, y, joined, *kept)])


def merge_backward(
    dh: Tensor | None,
    dy: Tensor | None,
    dpartial: Tensor | None,
    h: Tensor | None,
    o: Tensor,
    lse: Tensor,
    partial: Tensor,
    query: Tensor,
    rms_weight: Tensor,
    output_rms_weight: Tensor | None,
    score: Tensor,
    rstd: Tensor,
    norm_rstd: Tensor | None,
    need_weights: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    state, weights = State(o, lse), Weights(query, rms_weight, output_rms_weight)
    statistics, needed = Statistics(score, rstd, None, norm_rstd), (need_weights[0], need_weights[1])
    if dh is None and dy is None:
        dh = torch.zeros_like(partial)
    dh, dweight = library.gradient_of_h(dh, dy, h, weights, statistics, need_weights[2])
    given = (dh, dpartial, state, partial, weights, statistics, needed)
    device = device_for(partial.device)
    gradients = reference.merge_backward(*given) if device is None else two_phase.merge_backward(*given, device)
    return tuple([library.contiguous(result) for result in (*gradients, dweight)])


def _fake_phase1(queries, blocks, stacked, rms_weight, eps, save):  # type: ignore[no-untyped-def]
    like, dtype = blocks[0], statistics_dtype(blocks[0].dtype)
    shape = like.shape[1:] if stacked else like.shape
    n_blocks, n_tokens = like.shape[0] if stacked else len(blocks), prod(shape[:-1])
    n_layers = queries.shape[0]
    o = like.new_empty((n_tokens, n_layers, shape[-1]), dtype=dtype)
    lse = like.new_empty((n_layers, n_tokens), dtype=dtype)
    if not save:
        return o, lse, None, None
    score = like.new_empty((n_blocks, n_tokens, n_layers), dtype=dtype)
    return o, lse, score, like.new_empty((n_blocks, n_tokens), dtype=dtype)


def _fake_phase1_backward(do, dlse, queries, blocks, stacked, rms_weight, *rest):  # type: ignore[no-untyped-def]
    need_blocks, need_weights = rest[-2:]
    return fake_gradients(blocks, need_blocks), *fake_gradients((queries, rms_weight), need_weights)


def _fake_merge(o, lse, partial, x, query, rms_weight, output_rms_weight, eps, norm_eps, save):  # type: ignore[no-untyped-def]
    rows = lambda there: partial.new_empty(partial.shape) if there else None  # noqa: E731
    tokens = lambda there: lse.new_empty((lse.numel(),)) if there else None  # noqa: E731
    outputs = rows(True), rows(output_rms_weight is not None), rows(x is not None)
    return *outputs, *(tokens(save) for _ in range(2)), tokens(save and output_rms_weight is not None)


def _fake_merge_backward(  # type: ignore[no-untyped-def]
    dh, dy, dpartial, h, o, lse, partial, query, rms_weight, output_rms_weight, *rest
):
    state = (tensor.new_empty(tensor.shape) for tensor in (o, lse, partial))
    weights = (query, rms_weight, query if output_rms_weight is None else output_rms_weight)
    return *state, *fake_gradients(weights, rest[-1])


_STATE = "Tensor o, Tensor lse, Tensor partial"
OPERATORS.define(
    "phase1(Tensor queries, Tensor[] blocks, bool stacked, Tensor rms_weight, float eps, bool save) -> (Tensor o,"
    " Tensor lse, Tensor score, Tensor rstd)",
    phase1,
    _fake_phase1,
    forward_mode=True,
    batched=phase1,
)
OPERATORS.define(
    "phase1_backward(Tensor? do, Tensor? dlse, Tensor queries, Tensor[] blocks, bool stacked,"
    " Tensor rms_weight, Tensor score, Tensor rstd, bool[] need_blocks, bool[] need_weights) -> (Tensor[]"
    " dblocks, Tensor dqueries, Tensor drms_weight)",
    phase1_backward,
    _fake_phase1_backward,
    forward_mode=True,
    batched=phase1_backward,
)
OPERATORS.define(
    f"merge({_STATE}, Tensor? x, {WEIGHTS}, float eps, float norm_eps, bool save) -> (Tensor h, Tensor y, Tensor joined,"
    " Tensor score, Tensor rstd, Tensor norm_rstd)",
    merge,
    _fake_merge,
    forward_mode=True,
)
OPERATORS.define(
    f"merge_backward(Tensor? dh, Tensor? dy, Tensor? dpartial, Tensor? h, {_STATE}, {WEIGHTS}, Tensor score, Tensor rstd,"
    " Tensor? norm_rstd, bool[] need_weights) -> (Tensor do, Tensor dlse, Tensor dpartial_sum, Tensor dquery,"
    " Tensor drms_weight, Tensor doutput_rms_weight)",
    merge_backward,
    _fake_merge_backward,
    forward_mode=True,
)
