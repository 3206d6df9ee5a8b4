"""What the public functions refuse, and what autocast makes of their arguments."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from npu_tiling import device_for
from torch import Tensor
from torch.distributed import ProcessGroup

from . import parallel
from .options import DEFAULTS, REDUCTIONS, Options

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PLACES = 2**24  # columns up to which fp32 counts


class Part(NamedTuple):
    """Which part of a vocabulary the weight is; see `fused_linear_cross_entropy`."""

    process_group: ProcessGroup | None = None
    vocab_range: tuple[int, int] | None = None
    vocab_size: int | None = None


def checked_options(weight: Tensor, part: Part, **options: Any) -> Options:
    """`Options`, defaults where none are given, or an error that names what is wrong with one."""
    unknown = [name for name in options if name not in DEFAULTS]
    if unknown:
        raise TypeError(f"{unknown[0]} is no option: {', '.join(DEFAULTS)} are.")
    options = {**DEFAULTS, **options}
    if not isinstance(weight, Tensor):
        raise TypeError(f"weight is a {type(weight).__name__} and must be a tensor.")
    if weight.dim() != 2 or not weight.shape[0] or not weight.shape[1]:
        raise ValueError(f"weight has shape {tuple(weight.shape)} and must have shape (V, H), both at least 1.")
    if options["reduction"] not in REDUCTIONS:
        raise ValueError(f"reduction is {options['reduction']!r} and must be one of {', '.join(map(repr, REDUCTIONS))}.")
    if not 0.0 <= options["label_smoothing"] <= 1.0:
        raise ValueError(f"label_smoothing is {options['label_smoothing']} and must be from 0 to 1.")
    for name in ("lse_square_scale", "logit_scale"):
        if not -math.inf < options[name] < math.inf:
            raise ValueError(f"{name} is {options[name]} and must be finite.")
    softcap = options["softcap"]
    if softcap is not None and not 0.0 < softcap < math.inf:
        raise ValueError(f"softcap is {softcap} and must be above 0 and finite, or None.")
    if options["accum_dtype"] not in (None, torch.float32, weight.dtype):
        raise TypeError(f"accum_dtype is {options['accum_dtype']} and must be torch.float32, weight's dtype or None.")
    for name in ("chunk_tokens", "memory_budget"):
        value = options[name]
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} is {value!r} and must be a whole number of at least 1, or None.")
    for name in ("label_smoothing", "lse_square_scale", "logit_scale"):
        options[name] = float(options[name])
    group, first, size = _part(weight.shape[0], part)
    if part.process_group is not None and part.vocab_range is not None and options["chunk_tokens"] is None:
        share = -(-size // part.process_group.size())
        options["chunk_tokens"] = parallel.chunk_tokens(share, options["memory_budget"], weight.device)
    checked = Options(**options, group=group, vocab_first=first, vocab_size=size)
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
    first, last = vocab_range
    if size is None:
        raise ValueError("vocab_size is None and must be given with vocab_range.")
    if not 0 <= first <= last <= size or last - first != rows:
        raise ValueError(f"vocab_range is {vocab_range} and must be {rows} rows, weight's, within vocab_size, {size}.")
    return group.group_name, first, size


def autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands of a linear layer as autocast casts them: all but fp64 to its dtype."""
    if not isinstance(x, Tensor) or not torch.is_autocast_enabled(x.device.type):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(x.device.type)
    x, weight = (t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in (x, weight))
    if bias is not None and bias.is_floating_point() and bias.dtype != torch.float64:
        bias = bias.to(dtype)
    return x, weight, bias


def check(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None) -> None:
    """Types, dtypes, shapes and devices."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a {type(x).__name__} and must be a tensor.")
    if x.dtype not in _DTYPES and not (x.dtype == torch.float64 and device_for(x.device) is None):
        raise TypeError(f"x is {x.dtype} on {x.device.type} and must be torch.float32, torch.bfloat16 or torch.float16.")
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x has shape {tuple(x.shape)} and must have weight's last dimension, {weight.shape[1]}.")
    _check_dtype("weight", weight, x.dtype)
    if not isinstance(target, Tensor):
        raise TypeError(f"target is a {type(target).__name__} and must be a tensor.")
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"target is {target.dtype} and must be torch.int64 or torch.int32.")
    if target.shape != x.shape[:-1]:
        raise ValueError(f"target has shape {tuple(target.shape)} and must have x's but the last, {tuple(x.shape[:-1])}.")
    for name, vector in (("bias", bias), ("class_weight", class_weight)):
        if vector is None:
            continue
        if not isinstance(vector, Tensor):
            raise TypeError(f"{name} is a {type(vector).__name__} and must be a tensor or None.")
        if vector.shape != weight.shape[:1]:
            raise ValueError(f"{name} has shape {tuple(vector.shape)} and must have shape ({weight.shape[0]},).")
    if bias is not None:
        _check_dtype("bias", bias, x.dtype)
    if class_weight is not None and not class_weight.is_floating_point():
        raise TypeError(f"class_weight is {class_weight.dtype} and must be floating point.")
    for name, tensor in (("weight", weight), ("target", target), ("bias", bias), ("class_weight", class_weight)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device} and must be on x's device, {x.device}.")


def _check_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype not in (dtype, torch.float32):
        raise TypeError(f"{name} is {tensor.dtype} and must be torch.float32 or x's dtype, {dtype}.")
