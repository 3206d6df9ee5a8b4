"""The operators as PyTorch knows them, in its namespace `npu_attn_res`: schemas, and what tensors without data give.

Gradients are set in autograd.py.
"""

from __future__ import annotations

from math import prod

from npu_tiling.pytorch.autograd import OperatorLibrary
from npu_tiling.pytorch.tensors import nothing

from . import operators, reference

OPERATORS = OperatorLibrary("npu_attn_res")


def _fake_attn_res(blocks, stacked, w_query, w_norm, norm_weight, eps, norm_eps, save):  # type: ignore[no-untyped-def]
    like, dtype = blocks[0], reference.statistics_dtype(blocks[0].dtype)
    shape = like.shape[1:] if stacked else like.shape
    n_blocks, n_tokens = like.shape[0] if stacked else len(blocks), prod(shape[:-1])
    make = lambda kept, *shape: like.new_empty(shape, dtype=dtype) if kept else nothing(like)  # noqa: E731
    h = like.new_empty(shape)
    y = nothing(like) if norm_weight is None else like.new_empty(shape)
    scores = (make(save, n_blocks, n_tokens), make(save, n_blocks, n_tokens), make(save, n_tokens))
    return h, y, *scores, make(save and norm_weight is not None, n_tokens)


def _fake_blocks(blocks, need_blocks):  # type: ignore[no-untyped-def]
    return [v.new_empty(v.shape) if need else nothing(v) for v, need in zip(blocks, need_blocks, strict=True)]


def _fake_weights(weights, needed):  # type: ignore[no-untyped-def]
    return [w.new_empty(w.shape) if need else nothing(w) for w, need in zip(weights, needed, strict=True)]


def _fake_attn_res_backward(dh, dy, h, blocks, stacked, w_query, w_norm, norm_weight, *rest):  # type: ignore[no-untyped-def]
    need_blocks, need_weights = rest[-2:]
    third = w_query if norm_weight is None else norm_weight
    return _fake_blocks(blocks, need_blocks), *_fake_weights((w_query, w_norm, third), need_weights)


def _fake_phase1(queries, blocks, stacked, w_norm, eps, save):  # type: ignore[no-untyped-def]
    like, dtype = blocks[0], reference.statistics_dtype(blocks[0].dtype)
    shape = like.shape[1:] if stacked else like.shape
    n_blocks, n_tokens = like.shape[0] if stacked else len(blocks), prod(shape[:-1])
    n_layers = queries.shape[0]
    o = like.new_empty((n_tokens, n_layers, shape[-1]), dtype=dtype)
    maximum, total = (like.new_empty((n_layers, n_tokens), dtype=dtype) for _ in range(2))
    if not save:
        return o, maximum, total, nothing(like), nothing(like)
    score = like.new_empty((n_blocks, n_tokens, n_layers), dtype=dtype)
    return o, maximum, total, score, like.new_empty((n_blocks, n_tokens), dtype=dtype)


def _fake_phase1_backward(do, dmaximum, dtotal, queries, blocks, stacked, w_norm, *rest):  # type: ignore[no-untyped-def]
    need_blocks, need_weights = rest[-2:]
    return _fake_blocks(blocks, need_blocks), *_fake_weights((queries, w_norm), need_weights)


def _fake_merge(o, maximum, total, partial, x, w_query, w_norm, norm_weight, eps, norm_eps, save):  # type: ignore[no-untyped-def]
    like = lambda there: partial.new_empty(partial.shape) if there else nothing(partial)  # noqa: E731
    tokens = lambda there: maximum.new_empty((maximum.numel(),)) if there else nothing(partial)  # noqa: E731
    outputs = like(True), like(norm_weight is not None), like(x is not None)
    return *outputs, *(tokens(save) for _ in range(3)), tokens(save and norm_weight is not None)


def _fake_merge_backward(  # type: ignore[no-untyped-def]
    dh, dy, dpartial, h, o, maximum, total, partial, w_query, w_norm, norm_weight, *rest
):
    statistics = maximum.new_empty(maximum.shape), total.new_empty(total.shape)
    third = w_query if norm_weight is None else norm_weight
    gradients = o.new_empty(o.shape), *statistics, partial.new_empty(partial.shape)
    return *gradients, *_fake_weights((w_query, w_norm, third), rest[-1])


_WEIGHTS = "Tensor w_query, Tensor w_norm, Tensor? norm_weight"
_STATE = "Tensor o, Tensor maximum, Tensor total, Tensor partial"
_STATISTICS = "Tensor score, Tensor rstd, Tensor lse, Tensor norm_rstd"
OPERATORS.define(
    f"attn_res(Tensor[] blocks, bool stacked, {_WEIGHTS}, float eps, float norm_eps, bool save) -> (Tensor h, Tensor y,"
    f" {_STATISTICS})",
    operators.attn_res,
    _fake_attn_res,
    forward_mode=True,
    batched=operators.attn_res,
)
OPERATORS.define(
    f"attn_res_backward(Tensor? dh, Tensor? dy, Tensor? h, Tensor[] blocks, bool stacked, {_WEIGHTS}, {_STATISTICS},"
    " bool[] need_blocks, bool[] need_weights) -> (Tensor[] dblocks, Tensor dw_query, Tensor dw_norm, Tensor dnorm_weight)",
    operators.attn_res_backward,
    _fake_attn_res_backward,
    forward_mode=True,
    batched=operators.attn_res_backward,
)
OPERATORS.define(
    "phase1(Tensor queries, Tensor[] blocks, bool stacked, Tensor w_norm, float eps, bool save) -> (Tensor o,"
    " Tensor maximum, Tensor total, Tensor score, Tensor rstd)",
    operators.phase1,
    _fake_phase1,
    forward_mode=True,
    batched=operators.phase1,
)
OPERATORS.define(
    "phase1_backward(Tensor? do, Tensor? dmaximum, Tensor? dtotal, Tensor queries, Tensor[] blocks, bool stacked,"
    " Tensor w_norm, Tensor maximum, Tensor score, Tensor rstd, bool[] need_blocks, bool[] need_weights) -> (Tensor[]"
    " dblocks, Tensor dqueries, Tensor dw_norm)",
    operators.phase1_backward,
    _fake_phase1_backward,
    forward_mode=True,
    batched=operators.phase1_backward,
)
OPERATORS.define(
    f"merge({_STATE}, Tensor? x, {_WEIGHTS}, float eps, float norm_eps, bool save) -> (Tensor h, Tensor y, Tensor joined,"
    f" {_STATISTICS})",
    operators.merge,
    _fake_merge,
    forward_mode=True,
)
OPERATORS.define(
    f"merge_backward(Tensor? dh, Tensor? dy, Tensor? dpartial, Tensor? h, {_STATE}, {_WEIGHTS}, {_STATISTICS},"
    " bool[] need_weights) -> (Tensor do, Tensor dmaximum, Tensor dtotal, Tensor dpartial_sum, Tensor dw_query,"
    " Tensor dw_norm, Tensor dnorm_weight)",
    operators.merge_backward,
    _fake_merge_backward,
    forward_mode=True,
)
