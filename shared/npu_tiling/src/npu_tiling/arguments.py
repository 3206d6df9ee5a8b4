"""Checks of operators' arguments. A docstring says what a check accepts; its error, one sentence, names the argument, what
it was and what it must be.

Imports torch; `npu_tiling` itself does not.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from .chips import device_for
from .dispatch import is_shape

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LEAST, _LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # above 0, of fp32: kernels take numbers so


def tensor(name: str, value: Any, *, or_none: bool = False) -> None:
    """A tensor."""
    if not isinstance(value, Tensor) and not (or_none and value is None):
        raise TypeError(f"{name} is a {type(value).__name__} and must be a tensor{_or_none(or_none)}.")


def dense(name: str, value: Any) -> None:
    """A dense tensor."""
    tensor(name, value)
    if value.layout is not torch.strided or value.is_nested:
        raise TypeError(f"{name} is {'nested' if value.is_nested else value.layout} and must be a dense tensor.")


def floating(name: str, value: Any) -> None:
    """A dense tensor of a dtype that there are kernels for; fp64 too where plain PyTorch serves it."""
    dense(name, value)
    if value.dtype in DTYPES:
        return
    wide = (torch.float64,) if not value.is_meta and device_for(value.device) is None else ()
    if value.dtype not in wide:
        *most, last = map(str, (*DTYPES, *wide))
        raise TypeError(f"{name} is {value.dtype} on {value.device.type} and must be {', '.join(most)} or {last}.")


def rows(name: str, value: Any) -> None:
    """A floating tensor [..., D]."""
    if not isinstance(value, Tensor) or value.dtype not in DTYPES or value.layout is not torch.strided or value.is_nested:
        floating(name, value)
    if value.dim() == 0 or value.shape[-1] == 0:
        raise ValueError(f"{name} has shape {tuple(value.shape)} and must have a last dimension of at least 1.")


def dtype(name: str, value: Any, *allowed: torch.dtype) -> None:
    """A dense tensor of one of some dtypes."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_nested:
        dense(name, value)
    if value.dtype not in allowed:
        raise TypeError(f"{name} is {value.dtype} and must be {' or '.join(map(str, allowed))}.")


def parameter_dtype(name: str, value: Tensor, like: Tensor, of: str) -> None:
    """A tensor in fp32, or in the dtype of `like`, which the error names as `of`."""
    if value.dtype not in (like.dtype, torch.float32):
        other = "torch.float32 or " if like.dtype != torch.float32 else ""
        raise TypeError(f"{name} is {value.dtype} and must be {other}{of} dtype, {like.dtype}.")


def shape(name: str, value: Any, *allowed: Sequence[int]) -> None:
    """A dense tensor of one of some shapes."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_nested:
        dense(name, value)
    if torch.compiler.is_compiling() or value.shape not in allowed:
        if any(is_shape(value.shape, one) for one in allowed):
            return
        named = " or ".join(str(tuple(one)) for one in allowed)
        raise ValueError(f"{name} has shape {tuple(value.shape)} and must have shape {named}.")


def device(name: str, value: Tensor, like: Tensor, of: str) -> None:
    """A tensor on the device of another."""
    if value.device != like.device:
        raise ValueError(f"{name} is on {value.device} and must be on {of} device, {like.device}.")


def parameter(
    name: str, value: Any, shapes: Sequence[Sequence[int]], like: Tensor, of: str, *, or_none: bool = False
) -> None:
    """A dense tensor of one of some shapes, in fp32 or in the dtype of `like`, and on its device."""
    if or_none and value is None:
        return
    if not isinstance(value, Tensor):
        tensor(name, value, or_none=or_none)
    if value.layout is not torch.strided or value.is_nested:
        dense(name, value)
    is_one = not torch.compiler.is_compiling() and value.shape in shapes
    if not is_one or value.dtype != like.dtype or value.device != like.device:
        shape(name, value, *shapes)
        parameter_dtype(name, value, like, of)
        device(name, value, like, of)


def number(
    name: str,
    value: Any,
    *,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    finite: bool = True,
    or_none: bool = False,
) -> Any:
    """A number within limits and fp32's range, as a float (None stays that). Without `finite`, a larger one is infinite."""
    if type(value) is float and not least and most is None and above is None and 0 <= value <= _LARGEST:  # most are
        return value
    if value is None and or_none:
        return None
    if not _is_number(value):
        raise TypeError(f"{name} is a {type(value).__name__} and must be a number{_or_none(or_none)}.")
    is_large = value > _LARGEST or value < -_LARGEST
    found = float(value) if not is_large else math.inf if value > 0 else -math.inf
    within = (least is None or found >= least) and (most is None or found <= most) and (above is None or found > above)
    # torch.compile cannot trace math.isnan and math.isinf of a float that it keeps as a variable; it traces comparisons.
    is_nan, is_small = found != found, above == 0 < found < _LEAST
    if not within or is_nan or is_small or (finite and is_large):
        limits = [f"from {least:g} to {most:g}"] if least is not None and most is not None else []
        limits += [f"at least {least:g}"] if least is not None and most is None else []
        limits += [f"above {above:g}"] if above is not None else []
        limits += ["finite"] if finite and most is None else []
        ending = ", or None" if or_none else ""
        if within and not is_nan and value not in (math.inf, -math.inf):
            ending = f" in fp32{ending}"
        raise ValueError(f"{name} is {value} and must be {' and '.join(limits) or 'a number'}{ending}.")
    return found


def whole(name: str, value: Any, *, least: int | None = None, or_none: bool = False) -> Any:
    """A whole number, as an int (None stays that)."""
    if value is None and or_none:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt, Integral)):
        kind = ValueError if _is_number(value) else TypeError
        raise kind(f"{name} is {value!r} and must be a whole number{_at_least(least)}{', or None' if or_none else ''}.")
    if least is not None and value < least:
        raise ValueError(f"{name} is {value} and must be a whole number{_at_least(least)}{', or None' if or_none else ''}.")
    return value if isinstance(value, (int, torch.SymInt)) else int(value)


def flags(**values: Any) -> None:
    """Each True or False."""
    for name, value in values.items():
        if value is not True and value is not False:
            raise TypeError(f"{name} is {value!r} and must be True or False.")


def one_of(name: str, value: Any, allowed: Collection[str]) -> None:
    """One of some words."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} is {value!r} and must be one of {', '.join(map(repr, allowed))}.")


def span(name: str, value: Any) -> tuple[int, int]:
    """Two whole numbers."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{name} is {value!r} and must be two whole numbers, (first, last).")
    first, last = (whole(f"{name}[{i}]", one) for i, one in enumerate(value))
    return first, last


def pair(name: str, value: Any, of: str) -> tuple[Tensor, Tensor]:
    """A tuple of two tensors, which the error names as `of`."""
    if not isinstance(value, tuple) or len(value) != 2:
        size = f" of {len(value)}" if isinstance(value, tuple) else ""
        raise TypeError(f"{name} is a {type(value).__name__}{size} and must be a tuple of two tensors, {of}.")
    for place, one in enumerate(value):
        tensor(f"{name}[{place}]", one)
    return value


def _is_number(value: Any) -> bool:
    if type(value) is float or type(value) is int:  # most are
        return True
    return isinstance(value, (Real, torch.SymFloat, torch.SymInt)) and not isinstance(value, bool)


def _at_least(least: int | None) -> str:
    return "" if least is None else f" of at least {least}"


def _or_none(or_none: bool) -> str:
    return " or None" if or_none else ""
