"""`phase1` and `merge`, which the functions of the two phases call, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from npu_tiling import device_for
from npu_tiling.pytorch.autograd import Function, apply, needs_gradient
from npu_tiling.pytorch.tensors import statistics_dtype
from torch import Tensor

from .. import cpu, reference
from ..calls import Merge, MergeBackward, Phase1, Phase1Backward
from ..launch.layers import launch_phase1, launch_phase1_backward
from ..launch.merge import launch_merge, launch_merge_backward
from ..launch.norm import gradient_of_h
from .library import DWEIGHTS, OPERATORS, fake_gradients, schema, split_gradient


def _phase1(*arguments: Any) -> tuple[Tensor | None, ...]:
    call = Phase1(*arguments)
    device = device_for(call.queries.device)
    o, lse, *statistics = cpu.phase1(call) if device is None else launch_phase1(call, device)
    return o, lse.t().contiguous(), *(statistics if call.save else (None, None))


def _phase1_backward(*arguments: Any) -> tuple[Any, ...]:
    call = Phase1Backward(*arguments)
    device = device_for(call.score.device)
    dblocks, *dweights = cpu.phase1_backward(call) if device is None else launch_phase1_backward(call, device)
    return list(_contiguous(dblocks)), *_contiguous(dweights)


def _merge(*arguments: Any) -> tuple[Tensor | None, ...]:
    call = Merge(*arguments)
    device = device_for(call.prefix.device)
    *rows, score, rstd, norm_rstd = reference.merge(call) if device is None else launch_merge(call, device)
    return _contiguous((*rows, *((score, rstd, norm_rstd) if call.save else (None, None, None))))


def _merge_backward(*arguments: Any) -> tuple[Tensor | None, ...]:
    call = MergeBackward(*arguments)
    device = device_for(call.prefix.device)
    dh, dweight = gradient_of_h(call, device)
    gradients = reference.merge_backward(call, dh) if device is None else launch_merge_backward(call, dh, device)
    return _contiguous((*gradients, dweight))


def _contiguous(results: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Results with the strides that the fake functions promise: those of PyTorch's operators follow the inputs."""
    return tuple([None if result is None else result.contiguous() for result in results])


def _fake_phase1(*arguments: Any) -> tuple[Tensor | None, ...]:
    call = Phase1(*arguments)
    like, dtype = call.blocks[0], statistics_dtype(call.blocks[0].dtype)
    shape = like.shape[1:] if call.stacked else like.shape
    n_blocks, n_tokens = like.shape[0] if call.stacked else len(call.blocks), prod(shape[:-1])
    n_layers = call.queries.shape[0]
    o = like.new_empty((n_tokens, n_layers, shape[-1]), dtype=dtype)
    lse = like.new_empty((n_layers, n_tokens), dtype=dtype)
    if not call.save:
        return o, lse, None, None
    score = like.new_empty((n_blocks, n_tokens, n_layers), dtype=dtype)
    return o, lse, score, like.new_empty((n_blocks, n_tokens), dtype=dtype)


def _fake_phase1_backward(*arguments: Any) -> tuple[Any, ...]:
    call = Phase1Backward(*arguments)
    dweights = fake_gradients((call.queries, call.rms_weight), call.need_weights)
    return fake_gradients(call.blocks, call.need_blocks), *dweights


def _fake_merge(*arguments: Any) -> tuple[Tensor | None, ...]:
    call = Merge(*arguments)
    has_weight, has_output, save = call.output_rms_weight is not None, call.layer_output is not None, call.save
    rows = [call.prefix.new_empty(call.prefix.shape) if asked else None for asked in (True, has_weight, has_output)]
    n_tokens = call.lse.numel()
    return *rows, *(call.lse.new_empty((n_tokens,)) if asked else None for asked in (save, save, save and has_weight))


def _fake_merge_backward(*arguments: Any) -> tuple[Tensor | None, ...]:
    call = MergeBackward(*arguments)
    output_rms_weight = call.query if call.output_rms_weight is None else call.output_rms_weight
    state = (tensor.new_empty(tensor.shape) for tensor in (call.o, call.lse, call.prefix))
    return *state, *fake_gradients((call.query, call.rms_weight, output_rms_weight), call.need_weights)


OPERATORS.define(
    f"phase1({schema(Phase1)}) -> (Tensor o, Tensor lse, Tensor score, Tensor rstd)",
    _phase1,
    _fake_phase1,
    forward_mode=True,
    batched=_phase1,
)
OPERATORS.define(
    f"phase1_backward({schema(Phase1Backward)}) -> (Tensor?[] dblocks, Tensor dqueries, Tensor drms_weight)",
    _phase1_backward,
    _fake_phase1_backward,
    forward_mode=True,
    batched=_phase1_backward,
)
OPERATORS.define(
    f"merge({schema(Merge)}) -> (Tensor h, Tensor y, Tensor new_prefix, Tensor score, Tensor rstd, Tensor norm_rstd)",
    _merge,
    _fake_merge,
    forward_mode=True,
)
OPERATORS.define(
    f"merge_backward({schema(MergeBackward)}) -> (Tensor do, Tensor dlse, Tensor dprefix_sum, {DWEIGHTS})",
    _merge_backward,
    _fake_merge_backward,
    forward_mode=True,
)


class _Phase1(Function):
    @staticmethod
    def forward(ctx, run, stacked, eps, save, queries, rms_weight, *blocks):  # type: ignore[no-untyped-def]
        o, lse, score, rstd = run(*Phase1(queries, blocks, stacked, rms_weight, eps, save=True))
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
        return None, None, None, None, *dweights, *dblocks


class _Merge(Function):
    """`options`: eps and what follows it in `calls.Merge`."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, run, o, lse, prefix, layer_output, query, rms_weight, output_rms_weight, options
    ):
        eps, norm_eps, save = options
        weights = (query, rms_weight, output_rms_weight)
        h, y, new_prefix, *statistics = run(*Merge(o, lse, prefix, layer_output, *weights, eps, norm_eps, save=True))
        kept = None if output_rms_weight is None else h
        ctx.save_for_backward(kept, o, lse, prefix if layer_output is None else new_prefix, *weights, *statistics)
        ctx.output_dtype = None if layer_output is None else layer_output.dtype
        ctx.set_materialize_grads(False)
        if not save:
            return h, y, new_prefix, None, None, None
        ctx.mark_non_differentiable(*[each for each in statistics if each is not None])
        return h, y, new_prefix, *statistics

    @staticmethod
    def backward(ctx, dh, dy, dprefix, *_):  # type: ignore[no-untyped-def]
        _, _, _, need_prefix, need_output, need_query, need_rms_weight, need_output_weight, _ = ctx.needs_input_grad
        need_weights = [need_query, need_rms_weight, need_output_weight and dy is not None]
        state, dweights = [None] * 2, [None] * 3
        if dh is not None or dy is not None:
            *state, dprefix, dquery, dnorm, dweight = OPERATORS(
                "merge_backward", dh, dy, dprefix, *ctx.saved_tensors, need_weights
            )
            dweights = [dquery, dnorm, dweight]
        of_prefix = split_gradient(dprefix, need_prefix, need_output, ctx.output_dtype)
        return None, *state, *of_prefix, *dweights, None


def _recorded_phase1(run: Any, *arguments: Any) -> Any:
    if not needs_gradient(arguments):
        return run(*arguments)
    queries, blocks, stacked, rms_weight, eps, save = arguments
    return apply(_Phase1, run, stacked, eps, save, queries, rms_weight, *blocks)


def _recorded_merge(run: Any, *arguments: Any) -> Any:
    return apply(_Merge, run, *arguments[:7], arguments[7:]) if needs_gradient(arguments) else run(*arguments)


OPERATORS.autograd("phase1", _recorded_phase1)
OPERATORS.autograd("merge", _recorded_merge)
OPERATORS.gradient("phase1_backward")
OPERATORS.gradient("merge_backward")
