"""Attention Residuals over a bank of blocks and a running prefix: the public function, and what it writes to the two."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from npu_tiling import arguments
from npu_tiling.dispatch import Function, apply, are_transforms_active, can_bypass_dispatcher, is_mapped, needs_gradient
from npu_tiling.dtensor import is_distributed
from torch import Tensor

from .checks import as_blocks, check_bank, check_written, count_blocks, with_prefix_of_parts
from .operator import FORWARD, UPDATE, has_versions, versions_noted
from .records import AttnResResult, Forward
from .reference import scaled_query, softmax

_COUNTS = (int, type(None), Tensor)  # types of n_blocks
_KINDS = (Tensor, list, tuple)  # types of banks whose calls are recognised


def attn_res_bank(
    bank: Tensor | Sequence[Tensor],
    n_blocks: int | Tensor | None,
    prefix: Tensor,
    query: Tensor,
    rms_weight: Tensor,
    output_rms_weight: Tensor | None = None,
    rms_eps: float = 1e-6,
    scale: float = 1.0,
    *,
    layer_output: Tensor | None = None,
    append: bool = False,
    in_place: bool = False,
    output_dtype: torch.dtype | None = None,
    output_rms_eps: float | None = None,
    return_weights: bool = False,
) -> AttnResResult:
    """A layer's input as a softmax over the finished blocks in a bank and the running prefix, in one launch.

        p = prefix + layer_output        v = bank[..., 0, :], ..., bank[..., n_blocks - 1, :], p
        k_i = v_i / sqrt(mean(v_i^2) + rms_eps) * rms_weight
        alpha = softmax_i(scale <query, k_i>)        h = sum_i alpha_i v_i
        normalized = h / sqrt(mean(h^2) + output_rms_eps) * output_rms_weight

    p is rounded to the prefix's dtype before it is used. Rows that do not fit on chip take PyTorch's operators. Arithmetic
    is fp32, h is rounded once. The bank, the prefix, the layer's output and h may have dtypes of their own. With gradients,
    any write to the bank before the backward, but an append behind its blocks (with an n_blocks on the device, an append
    too), is PyTorch's error. The gradient of a bank has its shape, zero behind its blocks.

    Args:
        bank: [..., capacity, D], fp32, bf16 or fp16 (fp64 too on a CPU), rows at any one stride; or a list (tuple,
            deque, nn.ParameterList) of blocks [..., D], which may be empty.
        n_blocks: how many blocks of the bank count, from 0; an int, or a tensor with one int32 or int64 on the bank's
            device, which nothing waits for: below 0 it counts as 0, above the capacity as that. None: all.
        prefix: [..., D]: the sum of the outputs of the layers since the last block.
        query, rms_weight: [D], the prefix's dtype or fp32.
        output_rms_weight: [D], the prefix's dtype or fp32: of an RMSNorm of h in the same pass.
        rms_eps, scale, output_rms_eps, return_weights: as for `attn_res`.
        layer_output: [..., D]: is added to the prefix first.
        append: also write p into the bank, as block n_blocks, in the same launch. Nothing is written where n_blocks is a
            tensor and the bank is full.
        in_place: write p where the prefix is, which is no block that counts. With gradients nothing else may be written
            there before the backward.
        output_dtype: of h and normalized; None: the prefix's.

    Returns:
        An AttnResResult.

    Raises:
        TypeError: an argument has a type or dtype that is not supported.
        ValueError: shapes or devices do not match, an option is out of range, or `append` or `in_place` is impossible.

    Source: "Attention Residuals", arXiv 2603.15031.
    """
    bank = as_blocks(bank)
    if not isinstance(n_blocks, _COUNTS):
        n_blocks = arguments.whole("n_blocks", n_blocks, or_none=True)
    call = Forward(
        blocks=(),
        device_count=n_blocks if isinstance(n_blocks, Tensor) else None,
        prefix=prefix,
        layer_output=layer_output,
        query=query,
        rms_weight=rms_weight,
        output_rms_weight=output_rms_weight,
        stacked=isinstance(bank, Tensor),
        n_blocks=0,
        eps=rms_eps,
        norm_eps=rms_eps if output_rms_eps is None else output_rms_eps,
        dtype=output_dtype,
        save=return_weights,
    )
    is_recognised = append is False and in_place is False and type(scale) is float and scale == 1.0
    is_recognised = is_recognised and type(bank) in _KINDS and type(n_blocks) in _COUNTS
    results = FORWARD.if_checked("attn_res_bank", _with_blocks(call, bank, n_blocks)) if is_recognised else None
    if results is None:
        weights = (query, rms_weight, output_rms_weight)
        flags = {"append": append, "in_place": in_place, "return_weights": return_weights}
        numbers = (rms_eps, scale, output_rms_eps)
        rms_eps, scale, output_rms_eps = check_bank(
            bank, n_blocks, prefix, layer_output, weights, numbers, flags, output_dtype
        )
        replaces = in_place and layer_output is not None  # the prefix, by its sum with the layer's output
        options = (("append", bank, append), ("in_place", prefix, replaces))
        written = {name: tensor for name, tensor, is_set in options if is_set and isinstance(tensor, Tensor)}
        read = bank[:n_blocks] if isinstance(bank, (list, tuple)) and isinstance(n_blocks, int) else bank
        recorded = len(written) > 0 and needs_gradient((read, prefix, layer_output, *weights))
        if recorded and not torch.compiler.is_compiling():
            check_written(written)
        if is_distributed((bank, prefix, layer_output, *weights)):
            run = functools.partial(attn_res_bank, n_blocks=n_blocks, rms_eps=rms_eps, scale=scale)
            run = functools.partial(run, output_dtype=output_dtype, output_rms_eps=output_rms_eps, **flags)
            return with_prefix_of_parts(run, {"prefix": prefix, "layer_output": layer_output}, weights, bank)
        call = _with_blocks(call, bank, n_blocks)
        call = call._replace(query=scaled_query(query, scale), eps=rms_eps, norm_eps=output_rms_eps)
        call = call._replace(append=append, in_place=replaces)
        if written:
            results = _write(call, bank, written, recorded)
        else:
            results = FORWARD(call, "attn_res_bank" if is_recognised else None)
    h, y, new_prefix, score, *_ = results
    alpha = _weights(score, call.device_count, prefix.shape[:-1]) if return_weights else None
    y, new_prefix = None if output_rms_weight is None else y, prefix if layer_output is None else new_prefix
    return AttnResResult(h, y, new_prefix, alpha)


def _with_blocks(call: Forward, bank: Any, n_blocks: int | Tensor | None) -> Forward:
    """The record with the blocks of a bank that count, all where the number is None or on the device."""
    if call.stacked:
        is_split = bank.dim() > 1 and bank.layout is torch.strided and not bank.is_nested
        blocks = [bank.movedim(-2, 0) if is_split else bank]
    else:
        blocks = bank
    if n_blocks is None or isinstance(n_blocks, Tensor):
        return call._replace(blocks=blocks, n_blocks=count_blocks(blocks, stacked=call.stacked))
    return call._replace(blocks=blocks if call.stacked else blocks[:n_blocks], n_blocks=n_blocks)


def _write(
    call: Forward, bank: Any, written: Mapping[str, Tensor], recorded: bool
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """h, its RMSNorm, the new prefix and s of a call that writes to the bank or the prefix."""
    # Autograd and torch.func's transforms see copies alone: then the operator itself may not write to its arguments.
    by_kernel = can_bypass_dispatcher((bank, *call)) if recorded else not are_transforms_active()
    place: Any = call.n_blocks if call.device_count is None else call.device_count
    prefix: Any = call.prefix
    is_noted = isinstance(bank, Tensor) and has_versions(bank)
    with versions_noted(bank, place if call.append else None) if is_noted else nullcontext():
        h, y, new_prefix, score, *_ = UPDATE(call) if by_kernel else FORWARD(call)
        if by_kernel and not recorded:
            _count_as_written(list(written.values()))
        else:
            if call.append:
                _write_block(bank, place, prefix if call.layer_output is None else new_prefix, by_kernel)
            if call.in_place:
                _write_memory(prefix, new_prefix, by_kernel)
    return h, y, prefix if call.in_place else new_prefix, score


@torch.no_grad()
def _weights(score: Tensor, count: Tensor | None, leading: Sequence[int]) -> Tensor:
    """alpha [N + 1, ...] from scores [N + 1, T]."""
    if count is not None:
        slots = torch.arange(len(score), device=score.device)
        score = torch.where(((slots < count) | (slots == len(score) - 1)).unsqueeze(-1), score, float("-inf"))
    return softmax(score)[0].view(len(score), *leading)


def _count_as_written(tensors: Sequence[Tensor]) -> None:
    """For calls that autograd does not record: a later backward that needs the values from before is then an error."""
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def _write_memory(memory: Tensor, value: Tensor, by_kernel: bool) -> None:
    """Where autograd records the call: writes the value to the memory. `by_kernel`: a kernel has written it already."""
    if by_kernel:
        apply(_Written, memory, value, None)
    else:
        _check_mapped(memory, value)
        memory.copy_(value)


def _write_block(bank: Tensor, n_blocks: int | Tensor, block: Tensor, by_kernel: bool) -> None:
    """As `_write_memory`, to the block behind the first n_blocks. A full bank stays, if that is a tensor."""
    if not isinstance(n_blocks, Tensor):
        _write_memory(bank.select(-2, n_blocks), block, by_kernel)
    elif by_kernel:
        apply(_Written, bank, block, n_blocks)
    elif capacity := bank.shape[-2]:
        place = n_blocks.reshape(1).long().clamp(0, capacity - 1)
        rows = torch.where(n_blocks < capacity, block.unsqueeze(-2).to(bank.dtype), bank.index_select(-2, place))
        _check_mapped(bank, rows)
        bank.movedim(-2, 0)[place] = rows.movedim(-2, 0)


def _check_mapped(memory: Tensor, value: Tensor) -> None:
    """Raises an error where torch.func.vmap maps over the value and not over the memory."""
    if are_transforms_active() and is_mapped(value) and not is_mapped(memory):
        raise ValueError(
            "append or in_place is True and must be False for a bank or prefix that torch.func.vmap does not map over: all"
            " calls would write to one memory. Name its dimension in in_dims."
        )


class _Written(Function):
    """Tells autograd that memory has become a value: all of it, or block `place` at dimension -2, if there is one."""

    @staticmethod
    def forward(ctx, memory, value, place):  # type: ignore[no-untyped-def]
        ctx.mark_dirty(memory)
        ctx.dtype, ctx.is_view = value.dtype, memory._is_view()
        ctx.save_for_backward(place)
        return memory

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (place,) = ctx.saved_tensors
        need_memory, need_value, _ = ctx.needs_input_grad
        if place is None:  # for a view, autograd would take None as the gradient of the whole base
            of_memory = torch.zeros_like(gradient) if need_memory and ctx.is_view else None
            return of_memory, gradient.to(ctx.dtype) if need_value else None, None
        place = place.clamp(min=0)
        here = (torch.arange(gradient.shape[-2], device=place.device) == place).unsqueeze(-1)
        of_memory = torch.where(here, 0.0, gradient) if need_memory else None
        if not need_value:
            return of_memory, None, None
        row = gradient.index_select(-2, place.reshape(1).long().clamp(max=gradient.shape[-2] - 1)).squeeze(-2)
        return of_memory, torch.where(here.any(), row, 0.0).to(ctx.dtype), None
