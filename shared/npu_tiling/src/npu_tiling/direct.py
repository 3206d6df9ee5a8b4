"""Calling a kernel that Triton's JIT compiled without the JIT, whose look-up takes longer than a small kernel runs.

Three things are needed for that, and none is taken from a list of Triton's releases. Which launches share a compiled
kernel: `specialisation` says it from the arguments, by the JIT's own rules. Who else wants to know of a launch: `Watchers`
finds where this Triton keeps hooks. And how a compiled kernel is called: `observe` watches the JIT do it once, and where
that is not as expected, launches stay with the JIT.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

_INT32_END, _INT64_END = 2**31, 2**63
ALIGNMENT = 16  # Triton compiles another kernel for integers, and for addresses in bytes, that are multiples of this
_NO_MARKS = (None, None, None)  # launch metadata and two hooks: there are none where no profiler watches
_FLAGS = {bool, int, type(None)}  # of launches, and the scratch memory that a kernel has none of
_WRAPPERS = (  # all that a wrapper around a launcher in C names: triton-ascend 3.2.0's, and Triton's for CUDA to 3.6
    {
        *("TRITON_PROFILER_REGISTERED", "Tensor", "append", "ascend", "backends", "cache_dir", "compile_only"),
        *("enable_msprof_register_tensor", "get_cache_manager", "isinstance", "launch", "print", "shape", "torch"),
        *("triton", "utils"),
    },
    {
        *("_allocation", "_allocator", "_profile_allocator", "get", "global_scratch_align", "global_scratch_size"),
        *("launch", "launch_cooperative_grid", "launch_pdl", "num_ctas", "profile_scratch_align", "profile_scratch_size"),
    },
)
_watching = threading.Lock()


TYPED = "typed"  # a parameter whose annotation is its type, and which `do_not_specialize` names


def unspecialised(kernel: Any) -> tuple[bool | str, ...]:
    """For each parameter of a `@triton.jit` function whether `do_not_specialize` names it, or `TYPED`."""
    return tuple(
        bool(getattr(each, "do_not_specialize", False)) and (TYPED if getattr(each, "annotation_type", "") else True)
        for each in getattr(kernel, "params", ())
    )


def specialisation(scalars: Sequence[Any], plain: Iterable[bool | str]) -> list[Any]:
    """What the JIT compiles another kernel for: equal for numbers that share one.

    An integer becomes 32 or 64 bits wide by its value, 1 becomes a constant and multiples of 16 are known as such; of those
    that are `plain` (see `unspecialised`) the width alone counts, and of those with a type nothing. Of other types, floats
    first, the type does; True and False differ.
    """
    found: list[Any] = []
    for scalar, is_plain in zip(scalars, plain, strict=False):
        if is_plain is TYPED:
            continue
        if type(scalar) is not int:
            is_bool = type(scalar) is bool  # False is a multiple of 16 to triton-ascend 3.2
            found.append((bool, scalar) if is_bool else type(scalar))
            continue
        width = 0 if -_INT32_END <= scalar < _INT32_END else 4 if scalar < _INT64_END else 8
        found.append(width if is_plain else width + (1 if scalar == 1 else 3 if scalar % ALIGNMENT else 2))
    return found


def always_specialised(count: int) -> Iterable[bool]:
    """For `specialisation`, where it is not known what a kernel's parameters are."""
    return itertools.repeat(False, count)


class Watchers:
    """What a Triton calls at every launch, or before: where there is any of it, launches go through the JIT."""

    def __init__(self, triton: Any, kernel: Any) -> None:
        """For `kernel`, a function of the module `triton`."""
        hooks: Any = getattr(getattr(triton, "knobs", None), "runtime", None)
        if hooks is None and "ascend" in getattr(getattr(triton, "backends", None), "backends", ()):
            hooks = getattr(getattr(triton, "compiler", None), "CompiledKernel", None)  # triton-ascend 3.2 keeps them here
        self._hooks = hooks
        self._before: Sequence[Any] = getattr(kernel, "pre_run_hooks", ())
        self.known = hasattr(hooks, "launch_enter_hook") and hasattr(hooks, "launch_exit_hook")

    def __bool__(self) -> bool:
        enter, leave = self._hooks.launch_enter_hook, self._hooks.launch_exit_hook
        return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave) or self._before)


class DirectCall(NamedTuple):
    """A compiled kernel, called as the JIT was seen to: run(grid, 1, 1, stream, *handles, *pointers, *numbers, *rest).

    Attributes:
        run: what the JIT called.
        stream_of: gives the current stream of a device's number.
        handles: what comes before the kernel's arguments.
        rest: what comes after them.
    """

    run: Callable[..., Any]
    stream_of: Callable[[int], Any]
    handles: tuple[Any, ...]
    rest: tuple[Any, ...]

    def launch(self, index: int, grid: int, pointers: Sequence[Any], scalars: tuple[Any, ...]) -> None:
        """Launch it on the current stream of device number `index`."""
        self.run(grid, 1, 1, self.stream_of(index), *self.handles, *pointers, *scalars, *self.rest)


def observe(
    compiled: Any,
    launch: Callable[[], Any],
    grid: int,
    arguments: Sequence[Any],
    streams: Sequence[Callable[[int], Any]],
    device: int,
    is_cuda: bool,
) -> DirectCall | None:
    """Launch through the JIT and note how it calls the kernel that it has `compiled` for these arguments before.

    Args:
        compiled: what the JIT returned.
        launch: launches the same kernel again.
        grid: number of programs of that launch.
        arguments: tensors and numbers of that launch, in the kernel's order.
        streams: functions of a device's number that should give its current stream; the first that does is used.
        device: the number of the launch's device.
        is_cuda: whether that is one of CUDA.

    Returns:
        The same call without the JIT; None where it is another one than expected.
    """
    function, metadata = getattr(compiled, "function", None), getattr(compiled, "packed_metadata", None)
    name = "_run" if hasattr(compiled, "_run") else "run"
    wrapper = getattr(compiled, name, None)
    holders = [(compiled, name)]
    if callable(getattr(wrapper, "__dict__", {}).get("launch")) and _adds_nothing(wrapper):
        # The launcher in C. A wrapper that is not known, as triton-ascend 3.2.1's, is called as the JIT calls it.
        holders.insert(0, (wrapper, "launch"))
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
    with _watching, contextlib.ExitStack() as watched:
        try:
            for holder, attribute in holders:
                watched.enter_context(_noting_calls(holder, attribute, calls))
        except AttributeError:
            watched.close()
            launch()
            return None
        launch()
    for run, values in calls:  # of the launcher in C first, which returns first
        first = next((i for i, value in enumerate(values) if value is arguments[0]), 0)  # of the kernel's arguments
        end, marks = first + len(arguments), first - len(_NO_MARKS)
        as_expected = (
            values[:3] == (grid, 1, 1)
            and _same(values[4:5], [function])
            and set(map(type, values[5 : marks - 1])) <= _FLAGS
            and _same(values[marks - 1 : marks], [metadata])
            and _same(values[first:end], arguments)
        )
        if as_expected and callable(run):
            stream_of = next((one for one in streams if is_cuda or one(device) == values[3]), None)
            if stream_of is not None:
                return DirectCall(run, stream_of, (*values[4:marks], *_NO_MARKS), values[end:])
    return None


@contextlib.contextmanager
def _noting_calls(holder: Any, name: str, calls: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> Iterator[None]:
    """Add what `holder` has as `name`, and its arguments, to `calls` whenever it was called by position."""
    run = getattr(holder, name)

    def watched(*values: Any, **named: Any) -> Any:
        found = run(*values, **named)
        calls.append((run, () if named else values))
        return found

    setattr(holder, name, watched)
    try:
        yield
    finally:
        setattr(holder, name, run)


def _adds_nothing(wrapper: Any) -> bool:
    """Whether calling it is known to be nothing but the call of its `launch`, where no profiler watches.

    For a kernel without scratch memory, which `observe` sees to.
    """
    code = getattr(vars(type(wrapper)).get("__call__"), "__code__", None)
    return code is not None and any(_names(code) <= known for known in _WRAPPERS)


def _names(code: Any) -> set[str]:
    """What a function names, and the comprehensions inside it."""
    inner = (constant for constant in code.co_consts if hasattr(constant, "co_names"))
    return set(code.co_names).union(*map(_names, inner))


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))
