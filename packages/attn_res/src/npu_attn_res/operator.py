"""The operators of `attn_res` in PyTorch's namespace `npu_attn_res`, and their autograd function.

`attn_res` is what `attn_res` and `attn_res_bank` call, `attn_res_update` the same for arguments that it writes to, and
`attn_res_backward` is their backward. Blocks come as a list of tensors [..., D], or, `stacked`, as a list of one tensor
[N, ..., D]. Statistics have one dimension for all tokens, T. Accelerators run plans of kernels, a CPU the definition in
reference.py. Those of the two phases: two_phase/operator.py.

At the end: which blocks of a bank a call has read, and whether anything was written to them since.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from npu_tiling import device_for
from npu_tiling.chips import dry_runs
from npu_tiling.dispatch import Function, OperatorLibrary, apply, are_transforms_active, is_backward, save_tensors, unviewed
from npu_tiling.operators import Operator
from torch import Tensor

from . import reference
from .records import DWEIGHTS, Backward, Forward, reads_h

LIBRARY = OperatorLibrary("npu_attn_res")
RESULTS = ("h", "y", "new_prefix", "score", "rstd", "lse", "norm_rstd")


FORWARD = Operator(
    LIBRARY,
    "attn_res",
    Forward,
    RESULTS,
    plan=f"{__package__}.plans:forward",
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
    plan=f"{__package__}.plans:forward",
    reference=reference.compute_forward,
    writes=["blocks", "prefix"],
)
BACKWARD = Operator(
    LIBRARY,
    "attn_res_backward",
    Backward,
    ["dblocks", "dprefix_sum", *DWEIGHTS],
    plan=f"{__package__}.plans:backward",
    reference=reference.compute_backward,
    lists=["dblocks"],
    forward_mode=True,
    batched=True,
    is_gradient=True,
)
# What a backward reads of its forward, before the blocks.
_SAVED = ("h", "device_count", "prefix", "query", "rms_weight", "output_rms_weight", "score", "rstd", "lse", "norm_rstd")
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
        is_noted = stacked and prefix is not None and has_versions(blocks[0])
        ctx.blocks_read = ReadBlocks(blocks[0], n_blocks if device_count is None else None) if is_noted else None
        save_statistics = True
        options = (stacked, n_blocks, eps, norm_eps, dtype, save_statistics, *update)
        h, y, new_prefix, *statistics = run(blocks, device_count, prefix, layer_output, *weights, *options)
        h, y = unviewed(h), None if y is None else unviewed(y)
        ctx.overwritten = None
        if layer_output is not None and in_place:
            new_prefix = _without_version_check(prefix)
            ctx.overwritten = prefix.detach(), prefix._version + 1  # as it will be once `replace` has told autograd
        chip = None if h.is_meta and not dry_runs else device_for(h.device)
        kept = h if output_rms_weight is not None or reads_h(h, chip) else None
        if stacked and prefix is not None:
            blocks = [_without_version_check(block) for block in blocks]
        own_prefix = prefix if new_prefix is None else new_prefix
        save_tensors(ctx, kept, device_count, own_prefix, *weights, *statistics, *blocks)
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
            if ctx.blocks_read is not None and not torch.compiler.is_compiling():  # its tensors have no versions
                ctx.blocks_read.check()
            saved = ctx.saved_tensors
            call = Backward(
                dh=dh,
                dy=dy,
                dprefix=dprefix,
                **dict(zip(_SAVED, saved, strict=False)),
                blocks=saved[len(_SAVED) :],
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


def _without_version_check(memory: Tensor) -> Tensor:
    """The same memory, of which autograd checks no version: `ReadBlocks` and `ctx.overwritten` do."""
    return memory.data


def _with_gradient(run: Any, blocks: Any, *others: Any) -> Any:
    tensors, options = others[:_N_TENSORS], others[_N_TENSORS:]
    results = apply(_AttnRes, run, options, *tensors, *blocks)
    return (*results, *(None,) * (len(RESULTS) - len(results)))  # statistics that were not asked for


FORWARD.autograd(_with_gradient)
UPDATE.autograd(_with_gradient)


# A write to any block changes the version of the whole bank. So each append notes how many versions are its own, and a
# backward knows whether all that came since its forward are appends behind the blocks that it reads.


class ReadBlocks:
    """The first n blocks of a bank as a call has read them: a later backward reads them again."""

    def __init__(self, blocks: Tensor, n_blocks: int | None) -> None:
        """For blocks [capacity, ..., D]. With n_blocks of 0 no write is an error. None: on the device; no append is one."""
        self._blocks, self._n_blocks = blocks.detach(), n_blocks  # of the same version
        self._place = None if n_blocks is None else _place(self._blocks[:n_blocks].movedim(0, -2))
        self._others = self._count_others()

    def check(self) -> None:
        """Raises PyTorch's error where anything but appends behind these blocks was written to the bank since."""
        if self._n_blocks != 0 and self._count_others() > self._others:
            n_blocks = "n_blocks" if self._n_blocks is None else self._n_blocks
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a bank of "
                f"{tuple(self._blocks.shape)} (capacity first), of whose blocks the first {n_blocks} must keep their values "
                "until the backward; behind them append=True alone may write."
            )

    def _count_others(self) -> int:
        """Versions of the bank that are no appends behind these blocks."""
        others = self._blocks._version
        for place, versions in _appends(self._blocks).items():
            if place is None or self._place is None or not _overlap(place, self._place):
                others -= versions
        return others


@contextmanager
def versions_noted(bank: Tensor, n_blocks: int | Tensor | None) -> Iterator[None]:
    """Notes the versions of a bank [..., capacity, D] that the write within is, to the block behind the first n_blocks.

    None: to a prefix that lies in the bank and is no block that counts. That, what a checkpoint appends again during a
    backward, and what goes where an n_blocks on the device says, are taken to leave blocks that a call has read as they are.
    """
    version = bank._version
    is_again = is_backward()
    block = n_blocks if isinstance(n_blocks, int) and not is_again else None
    place = None if block is None else _place(bank.detach().narrow(-2, block, 1))
    try:
        yield
    finally:  # a checkpoint leaves by an error, once it has what it needs
        _appends(bank)[place] += bank._version - version


def _appends(bank: Tensor) -> Counter[Any]:
    """Versions that were appends, by the place of the block, of all banks in one memory; they live as long as that does."""
    memory = vars(bank.untyped_storage())
    found: Counter[Any] = memory.setdefault("npu_attn_res_appends", Counter())
    return found


def _place(blocks: Tensor) -> tuple[Any, tuple[tuple[int, int], ...]]:
    """Where blocks [..., n, D] lie in their memory: the offset, and each dimension's stride and size."""
    return blocks.storage_offset(), tuple(zip(blocks.stride(), blocks.shape, strict=True))


def _overlap(one: Any, other: Any) -> bool:
    """Whether blocks at two places share memory. Of banks with other strides, they are taken not to."""
    (first, dims), (second, others) = one, other
    if [stride for stride, _ in dims] != [stride for stride, _ in others]:
        return False
    for (stride, size), (_, other_size) in sorted(zip(dims, others, strict=True), reverse=True):
        (i, first), (j, second) = divmod(first, max(stride, 1)), divmod(second, max(stride, 1))
        if i + size <= j or j + other_size <= i:
            return False
    return True


def has_versions(bank: Tensor) -> bool:
    """Whether the versions of a bank say what was written to it: a plain tensor's, outside of compilers and transforms."""
    if torch.compiler.is_compiling() or are_transforms_active():
        return False
    return type(bank) in (Tensor, torch.nn.Parameter) and not bank.is_inference()
