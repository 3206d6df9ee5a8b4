"""A pytest plugin for runs of this repository's tests: `python -m pytest -p tools.suite`, as `hatch run test` calls it.

Workers of pytest-xdist compute on one thread each. Tests on the emulated NPU have the marker "compilers".
Garbage collections leave out what is older than the first test: with it, each takes half a second. They are rare.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator

import pytest

COMPILERS = "compilers"
THRESHOLDS = (20_000, 20, 20)  # of garbage collections, which take 7 % of the time at 700, 10, 10


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):  # as many processes as cores: more threads get in the way
        os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(*THRESHOLDS)
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before -m is applied
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        places = getattr(item, "callspec", None)
        if places is not None and "emulated" in places.params.values():
            item.add_marker(COMPILERS)
