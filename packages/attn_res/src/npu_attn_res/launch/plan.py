"""Plans of launches for whole rows, cached by shapes, strides, dtypes and options."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from npu_tiling import Device, LaunchSpec
from torch import Tensor

from ..calls import Backward, Forward
from ..shape import Task
from .sources import row_stride
from .specs import launch_spec, widest


class Plan(NamedTuple):
    """Everything of a launch except its tensors.

    Attributes:
        specs: the tilings to try in turn; none where whole rows do not fit on chip.
        n_tokens: T.
        scalars: the kernel's numbers, in its order; CUDA's backward appends one.
    """

    specs: tuple[LaunchSpec, ...]
    n_tokens: int
    scalars: tuple[int | float, ...]


class _Rows(NamedTuple):
    """The metadata of one tensor."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


_Options = tuple[bool, bool, bool]  # stacked, by_token and aligned
_Facts = tuple[tuple[torch.Size, tuple[int, ...], torch.dtype] | None, ...]


def plan_forward(call: Forward, rows: Sequence[Tensor | None], options: _Options, device: Device) -> Plan:
    """The plan of a forward; rows: the first tensor of blocks, the prefix and the layer's output."""
    normalised, numbers = call.output_rms_weight is not None, (call.n_blocks, call.eps, call.norm_eps, call.dtype)
    facts = tuple([None if each is None else (each.shape, each.stride(), each.dtype) for each in rows])
    return _plan_forward(facts, numbers, call.in_place, normalised, options, device)


def plan_backward(call: Backward, rows: Sequence[Tensor | None], options: _Options, device: Device) -> Plan:
    """The plan of a backward; rows: the first tensor of blocks, the prefix, dh and dprefix."""
    facts = tuple([None if each is None else (each.shape, each.stride(), each.dtype) for each in rows])
    return _plan_backward(facts, call.n_blocks, options, device)


@functools.lru_cache(maxsize=4096)
def _plan_forward(
    facts: _Facts,
    numbers: tuple[Any, ...],
    in_place: bool,
    normalised: bool,
    options: _Options,
    device: Device,
) -> Plan:
    n_blocks, eps, norm_eps, dtype = numbers
    stacked, by_token, aligned = options
    first, prefix, x = _records(facts)
    s_block, shape, s_token = _block(first, stacked)
    s_prefix, s_x, width = _stride(prefix), _stride(x), shape[-1]
    s_new = 0 if x is None else s_prefix if in_place else width
    h = dtype or (first if prefix is None else prefix).dtype
    spec = launch_spec(
        device,
        Task.FORWARD,
        width,
        widest(h, *[each.dtype for each in (first, prefix, x) if each is not None]),
        row_stride=max(s_token, s_prefix, s_x, s_new),
        n_sources=n_blocks,
        prefix=prefix is not None,
        normalised=normalised,
        by_token=by_token,
        aligned=aligned,
    )
    n_tokens = prod(shape[:-1])
    scalars = (n_blocks, n_tokens, s_block, s_token, eps, norm_eps, s_prefix, s_x, s_new)
    return Plan(() if spec is None else (spec,), n_tokens, scalars)


@functools.lru_cache(maxsize=4096)
def _plan_backward(facts: _Facts, n_blocks: int, options: _Options, device: Device) -> Plan:
    stacked, by_token, aligned = options
    first, prefix, dh, dprefix = _records(facts)
    s_block, shape, s_token = _block(first, stacked)
    s_prefix, s_dh, s_dprefix = _stride(prefix), _stride(dh), _stride(dprefix)
    specs = [
        launch_spec(
            device,
            Task.BACKWARD,
            shape[-1],
            first.dtype if prefix is None else widest(dh.dtype, first.dtype, prefix.dtype),
            row_stride=max(s_token, s_dh, s_prefix, s_dprefix),
            n_sources=n_blocks,
            prefix=prefix is not None,
            fp32_dh=dh.dtype == torch.float32,
            by_token=rows_by_token,
            aligned=aligned,
        )
        for rows_by_token in ((True, False) if by_token else (False,))
    ]
    n_tokens = prod(shape[:-1])
    scalars = (n_blocks, n_tokens, s_block, s_token, s_dh, s_prefix, s_dprefix)
    return Plan(tuple(spec for spec in specs if spec is not None), n_tokens, scalars)


def _records(facts: _Facts) -> list[Any]:
    return [None if each is None else _Rows(*each) for each in facts]


def _block(first: _Rows, stacked: bool) -> tuple[int, torch.Size, int]:
    """Elements from one block to the next, a block's shape, and elements from one of its rows to the next."""
    if not stacked:
        return 0, first.shape, _stride(first)
    block = _Rows(first.shape[1:], first.strides[1:], first.dtype)
    return first.strides[0], block.shape, _stride(block)


def _stride(rows: _Rows | None) -> int:
    stride = 0 if rows is None else row_stride(rows.shape, rows.strides)
    assert stride is not None
    return stride
