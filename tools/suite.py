"""A pytest plugin for runs of this repository's tests: `python -m pytest -p tools.suite`, as `hatch run test` calls it.

Workers of pytest-xdist compute on one thread each. Tests on the emulated NPU have the marker "compilers". The summary counts
skipped tests by their reason, and ends with the layers of which nothing ran.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

COMPILERS = "compilers"
_ran: set[str] = set()
_skipped: Counter[str] = Counter()
_layer_skips: dict[str, str] = {}


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):
        os.environ.setdefault(
            "OMP_NUM_THREADS", "1"
        )  # as many processes as cores, each with as many threads, get in the way


@pytest.hookimpl(tryfirst=True)  # before -m is applied
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        places = getattr(item, "callspec", None)
        if places is not None and "emulated" in places.params.values():
            item.add_marker(COMPILERS)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = _reason(report)
        _skipped[reason] += 1
        if COMPILERS in report.keywords:
            _layer_skips.setdefault(COMPILERS, reason)
    elif report.when == "call" and COMPILERS in report.keywords:
        _ran.add(COMPILERS)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        _skipped[f"{report.nodeid}, all of it: {_reason(report)}"] += 1


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    assert isinstance(report.longrepr, tuple)
    return report.longrepr[2].removeprefix("Skipped: ")


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _skipped:
        return
    terminalreporter.section("skipped")
    for reason, count in _skipped.most_common():
        terminalreporter.write_line(f"{count:5d}  {reason}")
    for layer, reason in _layer_skips.items():
        if layer not in _ran:
            terminalreporter.write_line(f"NOTHING RAN of the tests marked {layer}: {reason}", red=True)
