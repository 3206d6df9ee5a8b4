"""What commands work on: a package's `tests/ascend_calls.py`, a file with such calls, or one kernel of a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ..errors import OfflineError
from ..execute.recording import record
from ..launches import LaunchRecord
from ..toolchain.compilation import front_end_of
from . import kernel_file
from .files import kernels_of, load_file
from .stopped import said_of

Call = tuple[str, Callable[[], None]]
"""A label, and a function of no arguments that calls operators with CPU tensors."""


def load_calls(
    target: Path, function: str = "calls", given: Sequence[str] = (), grid: str | None = None
) -> list[tuple[Any, ...]]:
    """The calls that a command works on.

    Args:
        target: a folder with `tests/ascend_calls.py`, a file that has calls like that one, or `FILE::kernel`.
        function: `calls`, which has a call for every kind of tile, or `sized_calls`, which has sizes to measure time at.
        given: of `FILE::kernel`, its arguments as NAME=VALUE.
        grid: of `FILE::kernel`, the programs in x, y and z.

    Returns:
        Labels and functions; of `sized_calls` also the sizes to choose from, where they are listed.

    Raises:
        OfflineError: there is no such file or kernel, it does not define that function, or that yields nothing.
    """
    if "::" in str(target) or kernel_file.is_recording(str(target)):
        found = kernel_file.parse(str(target), given, grid)
        return (
            [kernel_file.tuned_call(found)] if function == "sized_calls" else [(call.label, call.launch) for call in found]
        )
    if given or grid is not None:
        raise OfflineError(f"arguments and --grid are for one kernel: {target}::KERNEL{_kernels(target)}")
    module = _module(target, function)
    if not hasattr(module, function):
        what = "Iterable[tuple[str, Callable[[], None]]]"
        other = f", or name a kernel: {target}::KERNEL{_named(kernels_of(module))}" if target.suffix == ".py" else ""
        raise OfflineError(f"{module.__file__} must define {function}() -> {what}{other}")
    calls = list(getattr(module, function)())
    if not calls:
        raise OfflineError(f"{function}() of {module.__file__} yields nothing")
    return calls


def load_sample(package: Path, name: str = "SAMPLE") -> list[str]:
    """Labels of the calls that stand for all in quick checks: a tuple of `tests/ascend_calls.py`.

    Args:
        package: its folder.
        name: `SAMPLE`, a call for each kind of tile; `WAYS`, calls that launch every kernel with every value of its flags;
            `KERNELS`, those of `WAYS` that launch every kernel.

    Raises:
        OfflineError: there is none, or it has a label that no call has.
    """
    labels = list(getattr(_module(package), name, ()))
    unknown = set(labels) - {label for label, _ in load_calls(package)}
    if unknown or not labels:
        raise OfflineError(f"{name} of {package}/tests/ascend_calls.py is {labels}, must be labels that calls() yields")
    return labels


def _module(target: Path, function: str = "calls") -> Any:
    if target.suffix == ".py":
        return load_file(target)
    path = target / "tests" / "ascend_calls.py"
    if not path.is_file():
        what = f"it must define {function}() -> Iterable[tuple[str, Callable[[], None]]]"
        raise OfflineError(f"{path} does not exist: {what}. For a kernel in a file write FILE::KERNEL")
    return load_file(path)


def _kernels(target: Path) -> str:
    """The kernels of a file, for messages."""
    if target.suffix != ".py" or not target.is_file():
        return ""
    return _named(kernels_of(load_file(target, partly=True)))


def _named(kernels: Iterable[str]) -> str:
    return f", KERNEL one of {', '.join(kernels) or '(none)'}"


def launches_of(
    calls: Iterable[tuple[str, Callable[[], object]]], soc: str, refused: dict[str, str] | None = None
) -> list[LaunchRecord]:
    """The launches of all calls, tiled for a chip.

    Args:
        calls: label and function.
        soc: the chip.
        refused: takes the label of each call that fails, and why; its launches are left out. None: a failure is an error.
    """
    found: list[LaunchRecord] = []
    for label, call in calls:
        try:
            with record(soc) as records:
                call()
        except Exception as error:
            if refused is None:
                error.add_note(f"in the call {label!r}, recorded for {soc}")
                raise
            refused[label] = said_of(error)
        else:
            found += records
    return found


def ttir_of(launches: Iterable[LaunchRecord]) -> dict[str, str]:
    """The TTIR of each kernel by name, of its first launch; where triton-ascend refuses that, its first line alone."""
    first: dict[str, LaunchRecord] = {}
    for launch in launches:
        first.setdefault(launch.name, launch)
    return {name: _ttir(launch) for name, launch in first.items()}


def _ttir(launch: LaunchRecord) -> str:
    try:
        return front_end_of(launch)[1]
    except OfflineError:
        from triton.compiler.code_generator import get_jit_fn_file_line

        file, line = get_jit_fn_file_line(launch.kernel)
        return f'#loc = loc("{file}":{line}:0)'
