"""Checks of options, those of the loss and those of a distillation, and the part of a vocabulary that they are for."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from npu_tiling import device_for
from npu_tiling.pytorch import arguments
from torch import Tensor
from torch.distributed import ProcessGroup

from .options import DIVERGENCES, NAMES, REDUCTIONS, DistillationOptions, EachOptions, Options

_Checked = TypeVar("_Checked", Options, DistillationOptions)
_PLACES = 2**24  # columns up to which fp32 counts
_MOST_CHECKED = 1024
_checked: dict[Hashable, Any] = {}
# Options that are numbers, with their limits, and those that are one of a few words.
_POSITIVE: dict[str, Any] = {"above": 0}
_NUMBERS: dict[str, dict[str, Any]] = {
    "label_smoothing": {"least": 0, "most": 1},
    "lse_square_scale": {},
    "logit_scale": {},
    "softcap": {**_POSITIVE, "or_none": True},
    "beta": _POSITIVE,
    "temperature": _POSITIVE,
    "soft_weight": {},
    "hard_weight": {},
    "teacher_softcap": {**_POSITIVE, "or_none": True},
    "teacher_logit_scale": {},
}
_WORDS = {"reduction": REDUCTIONS, "divergence": DIVERGENCES}
_FLAGS = {
    kind: [name for name, default in kind._field_defaults.items() if default is False]
    for kind in (Options, DistillationOptions)
}


class Part(NamedTuple):
    """Which part of a vocabulary the weight is; see `fused_linear_cross_entropy`."""

    process_group: ProcessGroup | None = None
    vocab_range: tuple[int, int] | None = None
    vocab_size: int | None = None


def named_options(options: Mapping[str, Any], *, taken: Collection[str] = ()) -> tuple[Part, Options]:
    """`Part` and `Options` by name, the defaults where none are given; their values are not checked yet.

    Args:
        taken: options of `fused_linear_cross_entropy` that this caller sets itself.
    """
    allowed = [name for name in (*NAMES, *Part._fields) if name not in taken]
    for name in options:
        if name not in allowed:
            raise TypeError(f"{name} is no option here: {', '.join(allowed)} are.")
    found = Options(**{name: value for name, value in options.items() if name in NAMES})
    return Part(*(options.get(name) for name in Part._fields)), found


def checked_options(weight: Tensor, part: Part, options: _Checked) -> _Checked:
    """The options with the weight's part of the vocabulary, or an error that names the wrong option.

    Checked options are remembered: every training step passes the same.
    """
    arguments.tensor("weight", weight)
    key: Hashable = None
    if not torch.compiler.is_compiling():
        group, vocab_range, size = part
        of_group = None
        if group is not None:
            if not isinstance(group, ProcessGroup):
                kind = type(group).__name__
                raise TypeError(f"process_group is a {kind} and must be a torch.distributed.ProcessGroup or None.")
            chip = None if vocab_range is None else device_for(weight.device)  # whose default budget cuts tokens
            of_group = (group.group_name, group.rank(), group.size(), chip)
        types = tuple(map(type, options))  # 1, 1.0 and True are equal
        key = (options, types, weight.shape, weight.dtype, of_group, vocab_range, size)
        try:
            known: _Checked | None = _checked.get(key)
        except TypeError:  # something without a hash is checked every time
            known = key = None
        if known is not None:
            return known
    checked: _Checked = _check_options(weight, part, options)
    if key is not None:
        if len(_checked) >= _MOST_CHECKED:
            _checked.clear()
        _checked[key] = checked
    return checked


def check_values(options: Any) -> Any:
    """The options with numbers as floats, or an error that names the one that is wrong with any weight."""
    given: dict[str, Any] = options._asdict()
    arguments.whole("ignore_index", options.ignore_index)
    for name, words in _WORDS.items():
        if name in given:
            arguments.one_of(name, given[name], words)
    changed: dict[str, Any] = {
        name: arguments.number(name.replace("teacher_", "teacher."), given[name], **limits)
        for name, limits in _NUMBERS.items()
        if name in given
    }
    if changed.get("beta", 0) >= 1:
        raise ValueError(f"beta is {given['beta']} and must be above 0 and below 1.")
    if options.accum_dtype is not None and not isinstance(options.accum_dtype, torch.dtype):
        raise TypeError(f"accum_dtype is {options.accum_dtype!r} and must be torch.float32, weight's dtype or None.")
    for name in ("chunk_tokens", "memory_budget"):
        changed[name] = arguments.whole(name, given[name], least=1, or_none=True)
    arguments.flags(**{name: given[name] for name in _FLAGS[type(options)]})
    return options._replace(**changed)


def _check_options(weight: Tensor, part: Part, options: EachOptions) -> Any:
    if weight.dim() != 2 or not weight.shape[0] or not weight.shape[1]:
        raise ValueError(f"weight has shape {tuple(weight.shape)} and must have shape (V, H), both at least 1.")
    options = check_values(options)
    if options.accum_dtype not in (None, torch.float32, weight.dtype):
        raise TypeError(f"accum_dtype is {options.accum_dtype} and must be torch.float32, weight's dtype or None.")
    group, first, size = _part(weight.shape[0], part)
    if options.sequence_parallel and not group:
        raise ValueError("sequence_parallel is True and must be False where there is no process_group.")
    checked = options._replace(group=group, vocab_first=first, vocab_size=size)
    if checked.of_head.argmax and size > _PLACES:
        asked = "return_predicted_tokens or return_token_accuracy"
        raise ValueError(f"The vocabulary has {size} columns and must have at most {_PLACES} for {asked}.")
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
