"""What a process may ask of the stand-in that it runs over: counts of launches, kernels that do nothing, profiling."""

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
    """The number of kernels and operators enqueued so far. Synchronise first: torch_npu has a queue of its own."""
    return int(_runtime().standin_launches() + _runtime().standin_operators())


@contextlib.contextmanager
def kernels_do_nothing() -> Iterator[None]:
    """Until the block ends, launches return at once and write nothing, so that a call takes only host time."""
    before = _runtime().standin_skip(1)
    try:
        yield
    finally:
        _runtime().standin_skip(before)


@contextlib.contextmanager
def profiling(*, shapes: bool) -> Iterator[list[int]]:
    """Until the block ends, CANN's profiler is on, with shapes of tensors or without.

    Yields:
        A list that is filled at the end: for each launch of a Triton kernel, how many tensors it reported the shapes of.
    """
    told: list[int] = []
    _runtime().standin_profile(int(shapes))
    try:
        yield told
    finally:
        _runtime().standin_profile(-1)
        while (number := _runtime().standin_tensors_told(len(told))) >= 0:
            told.append(number)
