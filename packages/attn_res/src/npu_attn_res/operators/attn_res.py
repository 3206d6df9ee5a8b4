"""`attn_res`, which `attn_res` and `attn_res_bank` call, and its gradient."""

from __future__ import annotations

from typing import Any

from npu_tiling import device_for
from npu_tiling.chips.detection import dry_runs
from npu_tiling.pytorch.autograd import Function, apply, needs_gradient
from torch import Tensor

from .. import cpu, writes
from ..calls import Backward, Forward
from ..launch.backward import launch_backward
from ..launch.forward import launch_forward
from ..launch.norm import gradient_of_h
from ..launch.outputs import Outputs, allocate_outputs, keeps_by_token, reads_h
from .library import DWEIGHTS, OPERATORS, fake_gradients, schema, split_gradient


def _forward(*arguments: Any) -> tuple[Tensor | None, ...]:
    call = Forward(*arguments)
    device = device_for(call.like.device)
    outputs = None if device is None else launch_forward(call, device)
    return cpu.forward(call) if outputs is None else outputs


def _update(*arguments: Any) -> tuple[Tensor | None, ...]:
    h, y, prefix, *statistics = _forward(*arguments)
    in_place = arguments[-1]
    return h, y, None if in_place else prefix, *statistics


def _backward(*arguments: Any) -> tuple[Any, ...]:
    call = Backward(*arguments)
    device = device_for(call.score.device)
    dh, dweight = gradient_of_h(call, device)
    gradients = None if device is None else launch_backward(call, dh, device)
    return *(cpu.backward(call, dh) if gradients is None else gradients), dweight


def _fake(*arguments: Any) -> tuple[Tensor | None, ...]:
    call = Forward(*arguments)
    device = None if call.like.is_meta and not dry_runs else device_for(call.like.device)
    by_token = call.save and device is not None and keeps_by_token(call, call.dtype or call.like.dtype, device)
    return allocate_outputs(call, device, by_token=by_token)


def _fake_update(*arguments: Any) -> tuple[Tensor | None, ...]:
    h, y, prefix, *statistics = _fake(*arguments)
    in_place = arguments[-1]
    return h, y, None if in_place else prefix, *statistics


def _fake_backward(*arguments: Any) -> tuple[Any, ...]:
    call = Backward(*arguments)
    output_rms_weight = call.query if call.output_rms_weight is None else call.output_rms_weight
    weights = fake_gradients((call.query, call.rms_weight, output_rms_weight), call.need_weights)
    dprefix = None if call.prefix is None else fake_gradients([call.prefix], [call.need_prefix])[0]
    return fake_gradients(call.blocks, call.need_blocks), dprefix, *weights


_RESULTS = "(Tensor h, Tensor y, Tensor new_prefix, Tensor score, Tensor rstd, Tensor lse, Tensor norm_rstd)"
_UPDATE = schema(Forward).replace("Tensor[] blocks", "Tensor(a!)[] blocks").replace("Tensor? prefix", "Tensor(b!) prefix")
OPERATORS.define(
    f"attn_res({schema(Forward).removesuffix(', bool append, bool in_place')}) -> {_RESULTS}",
    _forward,
    _fake,
    forward_mode=True,
    batched=_forward,
)
OPERATORS.define(f"attn_res_update({_UPDATE}) -> {_RESULTS}", _update, _fake_update)
OPERATORS.define(
    f"attn_res_backward({schema(Backward)}) -> (Tensor?[] dblocks, Tensor dprefix_sum, {DWEIGHTS})",
    _backward,
    _fake_backward,
    forward_mode=True,
    batched=_backward,
)


class _AttnRes(Function):
    """The gradient. `options` of the forward: stacked, n_blocks, and of `Forward` eps and what follows it."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        run,
        options,
        device_count,
        prefix,
        layer_output,
        query,
        rms_weight,
        output_rms_weight,
        *blocks,
    ):
        stacked, n_blocks, eps, norm_eps, dtype, save, *update = options
        weights = (query, rms_weight, output_rms_weight)
        sources = (blocks, stacked, n_blocks, device_count, prefix)
        options = (eps, norm_eps, dtype, True, *update)  # statistics, for the backward
        is_followed = stacked and prefix is not None and device_count is None and writes.is_followed(blocks[0])
        ctx.read = writes.ReadBlocks(blocks[0], n_blocks) if is_followed else None
        h, y, new_prefix, *statistics = run(*sources, layer_output, *weights, *options)
        ctx.overwritten = None
        if layer_output is not None and update and update[1]:  # in place
            new_prefix = _without_version_check(prefix)
            ctx.overwritten = prefix.detach(), prefix._version + 1  # as it will be once `writes.replace` has told autograd
        kept = h if output_rms_weight is not None or reads_h(h) else None
        if stacked and prefix is not None:
            blocks = [_without_version_check(block) for block in blocks]
        ctx.save_for_backward(
            kept, *weights, *statistics, device_count, prefix if new_prefix is None else new_prefix, *blocks
        )
        ctx.stacked, ctx.n_blocks = stacked, n_blocks
        ctx.output_dtype = None if layer_output is None else layer_output.dtype
        ctx.set_materialize_grads(False)
        if not save:
            return h, y, new_prefix
        ctx.mark_non_differentiable(*[each for each in statistics if each is not None])
        return h, y, new_prefix, *statistics

    @staticmethod
    def backward(ctx, dh, dy, dprefix, *_):  # type: ignore[no-untyped-def]
        _, _, _, need_prefix, need_output, *needed = ctx.needs_input_grad
        need_weights, need_blocks = needed[:3], needed[3:]
        dblocks, dweights = [None] * len(need_blocks), [None] * 3
        if dh is not None or dy is not None:
            if ctx.overwritten is not None and ctx.overwritten[0]._version != ctx.overwritten[1]:
                raise RuntimeError(
                    "prefix was written to again after in_place=True and must keep its values until the backward."
                )
            if ctx.read is not None:
                ctx.read.check()
            h, query, rms_weight, output_rms_weight, *others = ctx.saved_tensors
            *statistics, device_count, prefix = others[:6]
            weights, blocks = (query, rms_weight, output_rms_weight), others[6:]
            sources = (blocks, ctx.stacked, ctx.n_blocks, device_count, prefix)
            need_weights[2] = need_weights[2] and dy is not None
            needed = (need_blocks, need_prefix or need_output, need_weights)
            dblocks, dprefix, *dweights = OPERATORS(
                "attn_res_backward", dh, dy, dprefix, h, *sources, *weights, *statistics, *needed
            )
        of_prefix = split_gradient(dprefix, need_prefix, need_output, ctx.output_dtype)
        return None, None, None, *of_prefix, *dweights, *dblocks


def _without_version_check(bank: Tensor) -> Tensor:
    """The same memory, of which autograd checks no version: appends change it (see `writes.ReadBlocks`)."""
    return bank.data


def _recorded(run: Any, *arguments: Any) -> Any:
    if not needs_gradient(arguments):
        return run(*arguments)
    blocks, stacked, n_blocks, *tensors = arguments[:9]
    results = apply(_AttnRes, run, (stacked, n_blocks, *arguments[9:]), *tensors, *blocks)
    return (*results, *(None,) * (len(Outputs._fields) - len(results)))  # statistics that were not asked for


OPERATORS.autograd("attn_res", _recorded)
OPERATORS.autograd("attn_res_update", _recorded)
OPERATORS.gradient("attn_res_backward")
