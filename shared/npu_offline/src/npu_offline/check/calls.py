"""The calls of operators that a package lists in `tests/ascend_calls.py`, and the launches that they make."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..errors import OfflineError
from ..execute.recording import record
from ..launches import LaunchRecord

Call = tuple[str, Callable[[], None]]
"""A label, and a function of no arguments that calls operators with CPU tensors."""


def load_calls(package: Path, function: str = "calls") -> list[Call]:
    """The calls that `tests/ascend_calls.py` of a package yields.

    Args:
        package: its folder.
        function: `calls`, which has a call for every kind of tile, or `sized_calls`, which has sizes to measure time at.

    Returns:
        Labels and functions.

    Raises:
        OfflineError: there is no such file, or it does not define that function, or that yields nothing.
    """
    module = _module(package, function)
    if not hasattr(module, function):
        raise OfflineError(f"{module.__file__} must define {function}() -> Iterable[tuple[str, Callable[[], None]]]")
    calls = list(getattr(module, function)())
    if not calls:
        raise OfflineError(f"{function}() of {module.__file__} yields nothing")
    return calls


def load_sample(package: Path) -> list[str]:
    """Labels of the calls that stand for all in quick checks: `SAMPLE` of `tests/ascend_calls.py`.

    Raises:
        OfflineError: there is none, or it has a label that no call has.
    """
    labels = list(getattr(_module(package), "SAMPLE", ()))
    unknown = set(labels) - {label for label, _ in load_calls(package)}
    if unknown or not labels:
        raise OfflineError(f"SAMPLE of {package}/tests/ascend_calls.py is {labels}, must be labels that calls() yields")
    return labels


def _module(package: Path, function: str = "calls") -> Any:
    path = package / "tests" / "ascend_calls.py"
    if not path.is_file():
        raise OfflineError(f"{path} does not exist: it must define {function}() -> Iterable[tuple[str, Callable[[], None]]]")
    spec = importlib.util.spec_from_file_location(f"ascend_calls_of_{package.resolve().name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def launches_of(calls: Iterable[Call], soc: str) -> list[LaunchRecord]:
    """The launches of all calls, tiled for a chip."""
    with record(soc) as records:
        for label, call in calls:
            try:
                call()
            except Exception as error:
                error.add_note(f"in the call {label!r}, recorded for {soc}")
                raise
    return list(records)
