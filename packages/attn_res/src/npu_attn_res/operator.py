"""The operators of `attn_res` in PyTorch's namespace `npu_attn_res`, and their autograd function.

`attn_res` is what `attn_res` and `attn_res_bank` call, `attn_res_update` the same for arguments that it writes to, and
`attn_res_backward` is their backward. Blocks come as a list of tensors [..., D], or, `stacked`, as a list of one tensor
[N, ..., D]. Statistics have one dimension for all tokens, T. Accelerators run plans of kernels, a CPU the definition in
reference.py. Those of the two phases: two_phase/operator.py.
"""

from __future__ import annotations

from typing import Any

import torch
from npu_tiling import device_for
from npu_tiling.chips import dry_runs
from npu_tiling.dispatch import Function, OperatorLibrary, apply
from npu_tiling.operators import Operator
from npu_tiling.plans import Plan
from torch import Tensor

from . import reference, writes
from .records import DWEIGHTS, Backward, Forward, reads_h

LIBRARY = OperatorLibrary("npu_attn_res")
RESULTS = ("h", "y", "new_prefix", "score", "rstd", "lse", "norm_rstd")


# The modules of plans are imported when a plan is written: they import kernels, and kernels import Triton.
def _plan_forward(p: Plan, call: Any) -> Any:
    from .forward import forward

    return forward(p, call)


def _plan_backward(p: Plan, call: Any) -> Any:
    from .backward import backward

    return backward(p, call)


FORWARD = Operator(
    LIBRARY,
    "attn_res",
    Forward,
    RESULTS,
    plan=_plan_forward,
    reference=reference.compute_forward,
    fixed={"append": False, "in_place": False},
    forward_mode=True,
    batched=True,
)
UPDATE = Operator(
    LIBRARY,
    "attn_res_update",
    Forward,
    RESULTS,
    plan=_plan_forward,
    reference=reference.compute_forward,
    writes=["blocks", "prefix"],
)
BACKWARD = Operator(
    LIBRARY,
    "attn_res_backward",
    Backward,
    ["dblocks", "dprefix_sum", *DWEIGHTS],
    plan=_plan_backward,
    reference=reference.compute_backward,
    lists=["dblocks"],
    forward_mode=True,
    batched=True,
)
_N_TENSORS = len(FORWARD.signature.tensors) - 1  # beside the blocks


class _AttnRes(Function):
    """The gradient. `options` follow the tensors in a record; the last two are the update's alone."""

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
        _, in_place = update or (False, False)
        weights = (query, rms_weight, output_rms_weight)
        is_followed = stacked and prefix is not None and device_count is None and writes.is_followed(blocks[0])
        ctx.read = writes.ReadBlocks(blocks[0], n_blocks) if is_followed else None
        save_statistics = True
        options = (stacked, n_blocks, eps, norm_eps, dtype, save_statistics, *update)
        h, y, new_prefix, *statistics = run(blocks, device_count, prefix, layer_output, *weights, *options)
        ctx.overwritten = None
        if layer_output is not None and in_place:
            new_prefix = _without_version_check(prefix)
            ctx.overwritten = prefix.detach(), prefix._version + 1  # as it will be once `writes.replace` has told autograd
        kept = h if output_rms_weight is not None or reads_h(h, _chip_of(h)) else None
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
        need_weights, need_blocks = needed[:3], tuple(needed[3:])
        dblocks, dweights = [None] * len(need_blocks), [None] * 3
        if dh is not None or dy is not None:
            if ctx.overwritten is not None and ctx.overwritten[0]._version != ctx.overwritten[1]:
                raise RuntimeError(
                    "prefix was written to again after in_place=True and must keep its values until the backward."
                )
            if ctx.read is not None:
                ctx.read.check()
            h, query, rms_weight, output_rms_weight, score, rstd, lse, norm_rstd, device_count, prefix, *blocks = (
                ctx.saved_tensors
            )
            call = Backward(
                dh=dh,
                dy=dy,
                dprefix=dprefix,
                h=h,
                blocks=blocks,
                device_count=device_count,
                prefix=prefix,
                query=query,
                rms_weight=rms_weight,
                output_rms_weight=output_rms_weight,
                score=score,
                rstd=rstd,
                lse=lse,
                norm_rstd=norm_rstd,
                stacked=ctx.stacked,
                n_blocks=ctx.n_blocks,
                need_blocks=need_blocks,
                need_prefix=need_prefix or need_output,
                need_weights=(need_weights[0], need_weights[1], need_weights[2] and dy is not None),
            )
            dblocks, dprefix, *dweights = BACKWARD(call)
        of_prefix = split_gradient(dprefix, need_prefix, need_output, ctx.output_dtype)
        return None, None, None, *of_prefix, *dweights, *dblocks


def split_gradient(
    gradient: Tensor | None, need_prefix: bool, need_output: bool, dtype: torch.dtype | None
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of a prefix and of the layer's output, in its dtype, from that of their sum."""
    d_output = gradient.to(dtype) if need_output and gradient is not None and dtype is not None else None
    return gradient if need_prefix else None, d_output


def _chip_of(tensor: Tensor) -> Any:
    return None if tensor.is_meta and not dry_runs else device_for(tensor.device)


def _without_version_check(bank: Tensor) -> Tensor:
    """The same memory, of which autograd checks no version: appends change it (see `writes.ReadBlocks`)."""
    return bank.data


def _record(run: Any, blocks: Any, *others: Any) -> Any:
    tensors, options = others[:_N_TENSORS], others[_N_TENSORS:]
    results = apply(_AttnRes, run, options, *tensors, *blocks)
    return (*results, *(None,) * (len(RESULTS) - len(results)))  # statistics that were not asked for


FORWARD.autograd(_record)
UPDATE.autograd(_record)
BACKWARD.gradient()
