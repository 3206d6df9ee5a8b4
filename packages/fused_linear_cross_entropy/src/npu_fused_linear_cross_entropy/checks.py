"""Checks of the public functions' arguments, and autocast's casts of them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple

import torch
from npu_tiling.pytorch import arguments
from npu_tiling.pytorch.sharding import is_distributed
from npu_tiling.pytorch.tensors import is_autocast, statistics_dtype
from torch import Tensor
from torch.distributed import ProcessGroup

from . import parallel
from .options import NAMES, REDUCTIONS, Options

_PLACES = 2**24  # columns up to which fp32 counts


class Part(NamedTuple):
    """Which part of a vocabulary the weight is; see `fused_linear_cross_entropy`."""

    process_group: ProcessGroup | None = None
    vocab_range: tuple[int, int] | None = None
    vocab_size: int | None = None


_WHOLE = Part()
_FLAGS = tuple(name for name, default in Options._field_defaults.items() if default is False)
_MOST_CHECKED = 1024
_checked: dict[Hashable, Options] = {}


def named_options(options: Mapping[str, object]) -> Options:
    """`Options` by name, the defaults where none are given; not checked yet."""
    unknown = [name for name in options if name not in NAMES]
    if unknown:
        raise TypeError(f"{unknown[0]} is no option: {', '.join(NAMES)} are.")
    return Options(**options)  # type: ignore[arg-type]  # `checked_options` checks their types


def checked_options(weight: Tensor, part: Part, options: Options) -> Options:
    """The options with the weight's part of the vocabulary, or an error that names the wrong option.

    Checked options of a whole vocabulary are remembered: every training step passes the same.
    """
    arguments.tensor("weight", weight)
    key = None
    if part == _WHOLE and not torch.compiler.is_compiling():
        key = (options, tuple(map(type, options)), weight.shape, weight.dtype)  # with their types: 1, 1.0 and True are equal
        try:
            known = _checked.get(key)
        except TypeError:  # an option without a hash is refused below
            known = None
        if known is not None:
            return known
    checked = _check_options(weight, part, options)
    if key is not None:
        if len(_checked) >= _MOST_CHECKED:
            _checked.clear()
        _checked[key] = checked
    return checked


def _check_options(weight: Tensor, part: Part, options: Options) -> Options:
    if weight.dim() != 2 or not weight.shape[0] or not weight.shape[1]:
        raise ValueError(f"weight has shape {tuple(weight.shape)} and must have shape (V, H), both at least 1.")
    arguments.whole("ignore_index", options.ignore_index)
    arguments.one_of("reduction", options.reduction, REDUCTIONS)
    label_smoothing = arguments.number("label_smoothing", options.label_smoothing, least=0, most=1)
    lse_square_scale = arguments.number("lse_square_scale", options.lse_square_scale)
    logit_scale = arguments.number("logit_scale", options.logit_scale)
    softcap = arguments.number("softcap", options.softcap, above=0, or_none=True)
    if options.accum_dtype not in (None, torch.float32, weight.dtype):
        raise TypeError(f"accum_dtype is {options.accum_dtype} and must be torch.float32, weight's dtype or None.")
    chunk_tokens = arguments.whole("chunk_tokens", options.chunk_tokens, least=1, or_none=True)
    arguments.whole("memory_budget", options.memory_budget, least=1, or_none=True)
    arguments.flags(**{name: getattr(options, name) for name in _FLAGS})
    group, first, size = _part(weight.shape[0], part)
    if options.sequence_parallel and not group:
        raise ValueError("sequence_parallel is True and must be False where there is no process_group.")
    if part.process_group is not None and part.vocab_range is not None and chunk_tokens is None:
        share = -(-size // part.process_group.size())
        chunk_tokens = parallel.chunk_tokens(share, options.memory_budget, weight.device)
    checked = options._replace(
        label_smoothing=label_smoothing,
        lse_square_scale=lse_square_scale,
        logit_scale=logit_scale,
        softcap=softcap,
        chunk_tokens=chunk_tokens,
        group=group,
        vocab_first=first,
        vocab_size=size,
    )
    if checked.argmax and size > _PLACES:
        raise ValueError(f"weight has {size} rows and must have at most {_PLACES} where predicted tokens are asked for.")
    return checked


def _part(rows: int, part: Part) -> tuple[str, int, int]:
    """Name of the group, the first row, and how many rows all ranks have."""
    group, vocab_range, size = part
    if group is None:
        if vocab_range is not None or size is not None:
            raise ValueError("vocab_range and vocab_size must be left out where process_group is.")
        return "", 0, rows
    if vocab_range is None:
        return group.group_name, group.rank() * rows, group.size() * rows
    first, last = arguments.span("vocab_range", vocab_range)
    if arguments.whole("vocab_size", size, or_none=True) is None:
        raise ValueError("vocab_size is None and must be given with vocab_range.")
    assert size is not None
    if not 0 <= first <= last <= size or last - first != rows:
        raise ValueError(f"vocab_range is {vocab_range} and must be {rows} rows, weight's, within vocab_size, {size}.")
    return group.group_name, first, size


def check_weight_grad(weight_grad: Tensor | None, weight: Tensor, accum_dtype: torch.dtype | None) -> torch.dtype | None:
    """The dtype in which the weight's gradient is summed: weight_grad's, if it is given."""
    arguments.tensor("weight_grad", weight_grad, or_none=True)
    if weight_grad is None:
        return accum_dtype
    arguments.tensor("weight", weight)
    arguments.shape("weight_grad", weight_grad, weight.shape)
    arguments.device("weight_grad", weight_grad, weight, "weight's")
    if weight_grad.dtype != weight.dtype:
        arguments.dtype("weight_grad", weight_grad, weight.dtype, statistics_dtype(weight.dtype))
    if accum_dtype not in (None, weight_grad.dtype):
        raise TypeError(f"accum_dtype is {accum_dtype} and must be weight_grad's, {weight_grad.dtype}, or None.")
    if weight_grad.requires_grad:
        raise ValueError("weight_grad requires a gradient and must not.")
    if is_distributed((weight_grad, weight)):
        raise ValueError("weight_grad must be left out where there are DTensors.")
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise NotImplementedError("weight_grad must be left out under torch.func, whose functions change no argument.")
    return weight_grad.dtype


def autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands of a linear layer as autocast casts them; all as they are where x is fp64, which it leaves."""
    arguments.tensor("x", x)
    arguments.tensor("bias", bias, or_none=True)
    if not is_autocast(x) or x.dtype == torch.float64:
        return x, weight, bias
    dtype = torch.get_autocast_dtype(x.device.type)
    x, weight = (t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in (x, weight))
    if bias is not None and bias.is_floating_point() and bias.dtype != torch.float64:
        bias = bias.to(dtype)
    return x, weight, bias


def check_width(x: Tensor, weight: Tensor, frozen: Tensor | None) -> None:
    """Raises ValueError where x has not as many columns as the weight, or where an adapter stands beside that, as both."""
    frozen, rank = (weight, 0) if frozen is None else (frozen, weight.shape[1])
    if x.dim() == 0 or x.shape[-1] != frozen.shape[1] + rank:
        shape = (*x.shape[:-1], x.shape[-1] - rank) if x.dim() else ()
        raise ValueError(f"x has shape {shape} and must have weight's last dimension, {frozen.shape[1]}.")
    if rank:
        arguments.parameter_dtype("weight", frozen, x, "x's")
        arguments.device("weight", frozen, x, "x's")


def check(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    frozen: Tensor | None,
    options: Options,
) -> None:
    """Types, dtypes, shapes and devices."""
    arguments.floating("x", x)
    check_width(x, weight, frozen)
    arguments.parameter_dtype("weight", weight, x, "x's")
    arguments.tensor("target", target)
    arguments.dtype("target", target, torch.int64, torch.int32)
    arguments.shape("target", target, parallel.whole_shape(x, options))
    arguments.tensor("class_weight", class_weight, or_none=True)
    arguments.parameter("bias", bias, (weight.shape[:1],), x, "x's", or_none=True)
    if class_weight is not None:
        arguments.shape("class_weight", class_weight, weight.shape[:1])
        if not class_weight.is_floating_point():
            raise TypeError(f"class_weight is {class_weight.dtype} and must be floating point.")
        arguments.device("class_weight", class_weight, x, "x's")
    arguments.device("weight", weight, x, "x's")
    arguments.device("target", target, x, "x's")
