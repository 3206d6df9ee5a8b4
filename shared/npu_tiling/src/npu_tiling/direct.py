"""Calling a kernel that Triton's JIT compiled without the JIT, whose look-up takes longer than a small kernel runs.

Two things are needed for that, and neither is taken from a list of Triton's releases. Which launches share a compiled
kernel: `specialisation` says it from the arguments, by the JIT's own rules. And how a compiled kernel is called: `observe`
watches the JIT do it once, and where that is not as expected, launches stay with the JIT.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

_INT32_END, _INT64_END = 2**31, 2**63
_MULTIPLE = 16  # Triton compiles another kernel for integers, and for addresses, that are multiples of this
_NO_MARKS = (None, None, None)  # launch metadata and two hooks: there are none where no profiler watches
_watching = threading.Lock()


def unspecialised(kernel: Any) -> tuple[bool, ...]:
    """For each parameter of a `@triton.jit` function whether `do_not_specialize` names it."""
    return tuple(bool(getattr(parameter, "do_not_specialize", False)) for parameter in getattr(kernel, "params", ()))


def specialisation(scalars: Sequence[Any], plain: Iterable[bool]) -> list[Any]:
    """What the JIT compiles another kernel for: equal for numbers that share one.

    An integer becomes 32 or 64 bits wide by its value, 1 becomes a constant and multiples of 16 are known as such; of those
    that are `plain` (see `unspecialised`) the width alone counts. Of other types, floats first, the type does.
    """
    found: list[Any] = []
    for scalar, is_plain in zip(scalars, plain, strict=False):
        if type(scalar) is not int:
            found.append(type(scalar))
            continue
        width = 0 if -_INT32_END <= scalar < _INT32_END else 4 if scalar < _INT64_END else 8
        found.append(width if is_plain else width + (1 if scalar == 1 else 3 if scalar % _MULTIPLE else 2))
    return found


def always_specialised(count: int) -> Iterable[bool]:
    """For `specialisation`, where it is not known what a kernel's parameters are."""
    return itertools.repeat(False, count)


class DirectCall:
    """A compiled kernel, called as the JIT was seen to call it, with addresses in the place of tensors."""

    def __init__(self, compiled: Any, run: Callable[..., None], rest: Sequence[Any]) -> None:
        self._run, self._rest = run, tuple(rest)
        self._handles = (compiled.function, compiled.packed_metadata, *_NO_MARKS)

    def __call__(self, grid: int, stream: Any, pointers: Sequence[int | None], scalars: Sequence[Any]) -> None:
        self._run(grid, 1, 1, stream, *self._handles, *pointers, *scalars, *self._rest)


def observe(compiled: Any, launch: Callable[[], Any], grid: int, arguments: Sequence[Any]) -> DirectCall | None:
    """Launch through the JIT and note how it calls the kernel that it has `compiled` for these arguments before.

    Args:
        compiled: what the JIT returned.
        launch: launches the same kernel again.
        grid: number of programs of that launch.
        arguments: tensors and numbers of that launch, in the kernel's order.

    Returns:
        The same call without the JIT; None where it is another one than expected.
    """
    name = "_run" if hasattr(compiled, "_run") else "run"
    run = getattr(compiled, name, None)
    calls: list[tuple[Any, ...]] = []

    def watched(*values: Any, **named: Any) -> Any:
        calls.append(() if named else values)
        return run(*values, **named)  # type: ignore[misc]

    with _watching:
        try:
            setattr(compiled, name, watched)
        except AttributeError:
            launch()
            return None
        try:
            launch()
        finally:
            setattr(compiled, name, run)
    handles = (getattr(compiled, "function", None), getattr(compiled, "packed_metadata", None))
    before = 3 + 1 + len(handles) + len(_NO_MARKS)  # grid, stream
    for values in calls:
        given = values[before : before + len(arguments)]
        as_expected = values[:3] == (grid, 1, 1) and _same(values[4:6], handles) and _same(given, arguments)
        if as_expected and callable(run):
            return DirectCall(compiled, run, values[before + len(arguments) :])
    return None


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))
