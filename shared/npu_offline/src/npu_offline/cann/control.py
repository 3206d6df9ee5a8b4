"""What a process that runs over the stand-in may ask of it, and tell it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator


@functools.cache
def _runtime() -> ctypes.CDLL:
    library = ctypes.CDLL("libruntime.so")  # the environment says where
    for name in ("standin_launches", "standin_operators"):
        getattr(library, name).restype = ctypes.c_int64
    return library


def launched() -> int:
    """Kernels and operators put on streams so far; wait for the device first, torch_npu has a queue of its own."""
    return int(_runtime().standin_launches() + _runtime().standin_operators())


@contextlib.contextmanager
def kernels_do_nothing() -> Iterator[None]:
    """Launches return at once in this block, and write nothing: the time of a call is that of the host."""
    before = _runtime().standin_skip(1)
    try:
        yield
    finally:
        _runtime().standin_skip(before)


@contextlib.contextmanager
def profiling(*, shapes: bool) -> Iterator[list[int]]:
    """As while CANN profiles, with the shapes of tensors or without.

    Yields:
        A list that has, once the block has ended, how many tensors each launch of a Triton kernel told the shapes of.
    """
    told: list[int] = []
    _runtime().standin_profile(int(shapes))
    try:
        yield told
    finally:
        _runtime().standin_profile(-1)
        while (number := _runtime().standin_tensors_told(len(told))) >= 0:
            told.append(number)
