"""The gradients of the operators."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from npu_tiling.pytorch.autograd import Function, apply, needs_gradient
from torch import Tensor

from .operators import OPERATORS, single


class _AttnRes(Function):
    @staticmethod
    def forward(ctx, run, update, call, prefix, x, query, rms_weight, output_rms_weight, *blocks):  # type: ignore[no-untyped-def]
        weights, save = (query, rms_weight, output_rms_weight), call.save
        call = single.Call(blocks, call.stacked, call.n_blocks, call.counted, prefix, x, *weights, *call[9:-1], save=True)
        h, y, joined, *statistics = run(*call, *update)
        joined = None if prefix is None or x is None else joined
        ctx.overwritten = None
        if x is not None and update and update[1]:
            joined = _without_version_check(prefix)
            ctx.overwritten = prefix.detach(), prefix._version + 1  # as it will be once `writes.replace` has told autograd
        kept = h if output_rms_weight is not None or single.reads_h(h) else None
        y, norm_rstd = (None, None) if output_rms_weight is None else (y, statistics[3])
        if call.stacked and prefix is not None:
            blocks = [_without_version_check(block) for block in blocks]
        source = prefix if joined is None else joined
        ctx.save_for_backward(kept, *weights, *statistics[:3], norm_rstd, call.counted, source, *blocks)
        ctx.stacked, ctx.n_blocks = call.stacked, call.n_blocks
        ctx.dtype_of_x = None if x is None else x.dtype
        ctx.set_materialize_grads(False)
        if not save:
            return h, y, joined, None, None, None, None
        ctx.mark_non_differentiable(*[each for each in (*statistics[:3], norm_rstd) if each is not None])
        return h, y, joined, *statistics[:3], norm_rstd

    @staticmethod
    def backward(ctx, dh, dy, djoined, *_):  # type: ignore[no-untyped-def]
        need_prefix, need_x, *need_weights = ctx.needs_input_grad[3:8]
        need_blocks = list(ctx.needs_input_grad[8:])
        if dh is None and dy is None:
            of_prefix = _split_gradient(djoined, need_prefix, need_x, ctx.dtype_of_x)
            return None, None, None, *of_prefix, *(None,) * (3 + len(need_blocks))
        if ctx.overwritten is not None and ctx.overwritten[0]._version != ctx.overwritten[1]:
            raise RuntimeError(
                "prefix was written to again after in_place=True and must keep its values until the backward."
            )
        h, query, rms_weight, output_rms_weight, score, rstd, lse, norm_rstd, count, prefix, *blocks = ctx.saved_tensors
        weights, statistics = (query, rms_weight, output_rms_weight), (score, rstd, lse, norm_rstd)
        need_weights[2] = need_weights[2] and dy is not None
        needed = (need_blocks, need_prefix or need_x, need_weights)
        sources = (blocks, ctx.stacked, ctx.n_blocks, count, prefix)
        dblocks, dprefix, *dweights = OPERATORS(
            "attn_res_backward", dh, dy, djoined, h, *sources, *weights, *statistics, *needed
        )
        of_prefix = _split_gradient(dprefix, need_prefix, need_x, ctx.dtype_of_x)
        return None, None, None, *of_prefix, *_only(dweights, need_weights), *_only(dblocks, need_blocks)


def _without_version_check(bank: Tensor) -> Tensor:
    """The same memory, of which autograd checks no version: blocks behind those that count may be written to meanwhile."""
    return bank.data


def _split_gradient(
    gradient: Tensor | None, need_prefix: bool, need_x: bool, of_x: torch.dtype | None
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of a prefix and of what was added to it, from that of the sum."""
    dx = gradient.to(of_x) if need_x and gradient is not None and of_x is not None else None
    return gradient if need_prefix else None, dx


class _Phase1(Function):
    @staticmethod
    def forward(ctx, run, stacked, eps, save, queries, rms_weight, *blocks):  # type: ignore[no-untyped-def]
        o, lse, score, rstd = run(queries, blocks, stacked, rms_weight, eps, True)
        ctx.save_for_backward(queries, rms_weight, score, rstd, *blocks)
        ctx.stacked = stacked
        ctx.set_materialize_grads(False)
        if not save:
            return o, lse, None, None
        ctx.mark_non_differentiable(score, rstd)
        return o, lse, score, rstd

    @staticmethod
    def backward(ctx, do, dlse, *_):  # type: ignore[no-untyped-def]
        if do is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        queries, rms_weight, score, rstd, *blocks = ctx.saved_tensors
        need_weights, need_blocks = list(ctx.needs_input_grad[4:6]), list(ctx.needs_input_grad[6:])
        inputs = (queries, blocks, ctx.stacked, rms_weight, score, rstd)
        dblocks, *dweights = OPERATORS("phase1_backward", do, dlse, *inputs, need_blocks, need_weights)
        return None, None, None, None, *_only(dweights, need_weights), *_only(dblocks, need_blocks)


class _Merge(Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, run, o, lse, partial, x, query, rms_weight, output_rms_weight, eps, norm_eps, save
    ):
        weights = (query, rms_weight, output_rms_weight)
        h, y, joined, *statistics = run(o, lse, partial, x, *weights, eps, norm_eps, True)
        kept, y, norm_rstd = (None, None, None) if output_rms_weight is None else (h, y, statistics[2])
        joined = None if x is None else joined
        state = (o, lse, partial if x is None else joined)
        ctx.save_for_backward(kept, *state, *weights, *statistics[:2], norm_rstd)
        ctx.dtype_of_x = None if x is None else x.dtype
        ctx.set_materialize_grads(False)
        if not save:
            return h, y, joined, None, None, None
        ctx.mark_non_differentiable(*[each for each in (*statistics[:2], norm_rstd) if each is not None])
        return h, y, joined, *statistics[:2], norm_rstd

    @staticmethod
    def backward(ctx, dh, dy, djoined, *_):  # type: ignore[no-untyped-def]
        _, *need = ctx.needs_input_grad
        if dh is None and dy is None:
            return None, None, None, *_split_gradient(djoined, need[2], need[3], ctx.dtype_of_x), *(None,) * 6
        kept, *inputs = ctx.saved_tensors
        need_weights = [need[4], need[5], need[6] and dy is not None]
        do, dlse, dpartial, *dweights = OPERATORS("merge_backward", dh, dy, djoined, kept, *inputs, need_weights)
        state = (*_only((do, dlse), need[:2]), *_split_gradient(dpartial, need[2], need[3], ctx.dtype_of_x))
        return None, *state, *_only(dweights, need_weights), None, None, None


def _only(gradients: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor | None]:
    return [gradient if need else None for gradient, need in zip(gradients, needed, strict=True)]


def _attn_res(run, *arguments):  # type: ignore[no-untyped-def]
    call, update = single.Call(*arguments[:13]), arguments[13:]  # update: append and in_place, or nothing
    if needs_gradient((*call[4:9], call.blocks)):
        return apply(_AttnRes, run, update, call, *call[4:9], *call.blocks)
    return run(*arguments)


def _phase1(run, queries, blocks, stacked, rms_weight, eps, save):  # type: ignore[no-untyped-def]
    if needs_gradient((queries, rms_weight, blocks)):
        return apply(_Phase1, run, stacked, eps, save, queries, rms_weight, *blocks)
    return run(queries, blocks, stacked, rms_weight, eps, save)


def _merge(run, *arguments):  # type: ignore[no-untyped-def]
    return apply(_Merge, run, *arguments) if needs_gradient(arguments[:7]) else run(*arguments)


OPERATORS.autograd("attn_res", _attn_res)
OPERATORS.autograd("attn_res_update", _attn_res)
OPERATORS.autograd("phase1", _phase1)
OPERATORS.autograd("merge", _merge)
for _name in ("attn_res", "phase1", "merge"):
    OPERATORS.gradient(f"{_name}_backward")
