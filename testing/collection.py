"""Which tests are collected where, which of them every night alone, in what order, and with which seed.

A test that cannot run here is not collected. The last lines of a run count such tests by reason, and the others by level.

Where tests compile kernels, all cases are too many for every change. Of a product of parameters, the cases that have the
most pairs of values among them are tried, each on one chip with one toolchain, in turn. The rest is nightly, and so are all
but `few` cases of a list, where a test says so: they compile the same kernels, or say the same on a CPU.
"""

from __future__ import annotations

import inspect
import itertools
import random
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Generator, Hashable, Sequence
from typing import Any

import pytest

from . import ranks

IN_TURN = {"chip", "soc", "toolchain", "rows"}  # parameters that say where a kernel runs, and on how many rows
MOST = 6  # cases of a product, for every change
ON_A_DEVICE = {"npu_capture", "npu_no_waits"}  # fixtures
_LEVEL = "level"
_ABSENT = pytest.StashKey[Counter[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "uncollected(reason, when): no test where `when` holds of its `place` and parameters")
    config.addinivalue_line("markers", "few(number): so many cases where kernels are compiled, for every change")
    config.addinivalue_line("markers", "whole: all cases, for every change")


@pytest.hookimpl(tryfirst=True)  # before -m is applied
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    absent = {item: reason for item in items if (reason := _why_absent(item)) is not None}
    config.stash[_ABSENT] = Counter(absent.values())
    config.hook.pytest_deselected(items=list(absent))
    items[:] = [item for item in items if item not in absent]
    _leave_to_the_night(items)
    for item in items:
        item.user_properties.append((_LEVEL, _level(item)))
    if seed := config.getoption("--npu-seed"):
        random.Random(seed).shuffle(items)


def _leave_to_the_night(items: list[pytest.Item]) -> None:
    functions: defaultdict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        place = _place(item)
        compiles = item.get_closest_marker("compilers") is not None if place is None else place == "emulated"
        if compiles and item.get_closest_marker("nightly") is None and item.get_closest_marker("whole") is None:
            functions[item.nodeid.partition("[")[0], str(place)].append(item)
    for cases in functions.values():
        chosen = pairs([_factors(item) for item in cases])
        few = cases[0].get_closest_marker("few")
        most = few.args[0] if few else MOST if len(_factors(cases[0])) > 1 else len(cases)
        for number, item in enumerate(cases):
            if number not in chosen[:most]:
                item.add_marker(pytest.mark.nightly)


def pairs(cases: Sequence[dict[str, Hashable]]) -> list[int]:
    """The numbers of cases that have all pairs of values among them, those that add the most pairs first.

    Args:
        cases: the value of each parameter. Those named in `IN_TURN` are in no pair: each of their values is in some case.
    """
    wanted = [_wanted(case) for case in cases]
    missing = set().union(*wanted)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda number: len(wanted[number] & missing))
        chosen.append(best)
        missing -= wanted[best]
    return chosen


def _wanted(case: dict[str, Hashable]) -> set[Hashable]:
    names = sorted(name for name in case if name not in IN_TURN)
    some = {tuple((name, case[name]) for name in few) for few in itertools.combinations(names, min(2, len(names)))}
    return some | {(name, case[name]) for name in case.keys() & IN_TURN}


def _parameters(item: pytest.Item) -> dict[str, Any]:
    given = getattr(item, "callspec", None)
    return {} if given is None else dict(given.params)


def _place(item: pytest.Item) -> str | None:
    given = _parameters(item)
    return given.get("npu_place", given.get("place"))


def _factors(item: pytest.Item) -> dict[str, Hashable]:
    """The parameters of a test, those of one `parametrize` as one."""
    given = {name: value for name, value in _parameters(item).items() if name not in ("npu_place", "place")}
    values: dict[str, Hashable] = {name: id(value) for name, value in given.items()}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if isinstance(mark.args[0], str) else ",".join(mark.args[0])
        together = [name.strip() for name in names.split(",")]
        if len(together) > 1:
            values[names] = hash(tuple(values.pop(name, None) for name in together))
    return values


def _why_absent(item: pytest.Item) -> str | None:
    """Why a test cannot run here, as far as its marks say; None if it can."""
    for mark in item.iter_markers("skip"):
        return str(mark.kwargs.get("reason", *mark.args))
    for mark in item.iter_markers("skipif"):
        if any(condition is True for condition in mark.args):
            return str(mark.kwargs["reason"])
    if (place := _parameters(item).get("place")) in ranks.PLACES and (reason := ranks.why_not(place)) is not None:
        return reason
    if _place(item) in ("cpu", "emulated") and ON_A_DEVICE & set(getattr(item, "fixturenames", ())):
        return "a CPU has no graphs to capture, and nothing to wait for"
    values = {"place": _place(item), **_parameters(item)}
    for mark in item.iter_markers("uncollected"):
        reason, when = mark.args
        if when(*(values[name] for name in inspect.signature(when).parameters)):
            return str(reason)
    return None


def _level(item: pytest.Item) -> str:
    place = _place(item)
    if place is not None:
        return {"cpu": "definition on a CPU", "emulated": "Linalg IR emulated"}.get(place, str(place))
    if item.get_closest_marker("compilers") is None:
        return "host code"
    return "final modules executed" if "final" in item.path.name else "compiled for Ascend"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    random.seed(_seed(item))
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(_seed(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections.append(("seed", f"{_seed(item)}, of the test's name and --npu-seed"))
    return report


def _seed(item: pytest.Item) -> int:
    """Where the numbers begin that a test draws without a seed of its own."""
    return zlib.crc32(f"{item.config.getoption('--npu-seed')} {item.name}".encode())


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)  # in a worker of pytest-xdist, all of which collect the same
    if output is not None:
        absent: Counter[str] = session.config.stash.get(_ABSENT, Counter())
        output["absent"] = dict(absent)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[_ABSENT] = Counter(getattr(node, "workeroutput", {}).get("absent", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.stats.get(outcome, ())]
    noted = [dict(report.user_properties) for report in reports if report.when == "call"]
    levels = Counter(str(properties[_LEVEL]) for properties in noted if _LEVEL in properties)
    terminalreporter.section("levels")
    terminalreporter.write_line(", ".join(f"{level}: {count}" for level, count in levels.most_common()))
    absent: Counter[str] = config.stash.get(_ABSENT, Counter())
    for reason, count in absent.most_common():
        terminalreporter.write_line(f"{count} tests are not for here: {reason}")
