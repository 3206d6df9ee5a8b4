"""The launches of a program, kept with their arguments."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ..launches import Emulation, describe_tile
from .kernel_file import KernelCall
from .stopped import said_of
from .values import DTYPES

_NAMES = {getattr(torch, dtype): name for name, dtype in DTYPES.items()}
_NO_OPTIONS = ("grid", "warmup", "num_warps", "num_stages", "num_ctas")  # no options of Ascend's compilers
_HELD = (bool, int, float, str, type(None))


@dataclass
class Program:
    """What a program has launched so far.

    Attributes:
        calls: the first launch of each kernel and tile, with copies of its arguments from before it; no launch of what is no
            tensor and has a pointer.
        refused: kernels that did not launch, and why, by name: also where the program goes on without them.
    """

    calls: dict[tuple[str, str], KernelCall] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def watched(emulation: Emulation) -> Iterator[Program]:
    """Until the block ends, what is launched under an emulation."""
    from triton.runtime.jit import JITFunction

    launch, program, met = JITFunction.run, Program(), set[object]()

    def noted(kernel: Any, *arguments: Any, **options: Any) -> Any:
        given = dict(zip(kernel.arg_names, arguments, strict=False))
        given |= {name: value for name, value in options.items() if name in kernel.arg_names}
        constants = {each.name: repr(given.get(each.name)) for each in kernel.params if each.is_constexpr}
        tile = (kernel.fn, str(constants), str([_kind(value) for value in given.values()]))
        call = None if tile in met else _call(kernel, given, options)
        try:
            result = launch(kernel, *arguments, **options)
        except Exception as error:
            program.refused[kernel.fn.__name__] = said_of(error)
            raise
        if call is not None and emulation.launches:
            met.add(tile)
            program.calls.setdefault((call.kernel.__name__, describe_tile(emulation.launches[-1])), call)
        return result

    with mock.patch.object(JITFunction, "run", noted):
        yield program


def _kind(value: Any) -> object:
    """What of an argument decides how a kernel is compiled."""
    return str(value.dtype) if isinstance(value, Tensor) else value == 1 if isinstance(value, int) else type(value)


def _call(kernel: Any, given: Mapping[str, Any], options: Mapping[str, Any]) -> KernelCall | None:
    values = {name: getattr(value, "value", value) for name, value in given.items()}  # of constexprs
    defaults = {each.name: each.default for each in kernel.params if each.has_default}
    grid = options["grid"]
    grid = grid({**defaults, **values}) if callable(grid) else grid
    tensors = {name: value.detach() for name, value in values.items() if isinstance(value, Tensor)}
    texts = {name: [text] for name, value in values.items() if (text := _text(value)) is not None}
    if len(texts) < len(values):
        return None
    others = {name: value for name, value in options.items() if name not in (*values, *_NO_OPTIONS)}
    more = {name: value for name, value in others.items() if isinstance(value, _HELD)}
    path = Path(kernel.fn.__code__.co_filename)
    return KernelCall(path, kernel, texts, ",".join(map(str, grid)), {}, more, recorded=copy.deepcopy(tensors))


def _text(value: Any) -> str | None:
    """An argument as a command line would say it; None where it cannot."""
    import triton.language

    if isinstance(value, Tensor):
        return f"{_NAMES.get(value.dtype, value.dtype)}:{'x'.join(map(str, value.shape))}:recorded"
    if isinstance(value, _HELD):
        return value if isinstance(value, str) else repr(value)
    return next((f"tl.{name}" for name, dtype in vars(triton.language).items() if dtype is value), None)
