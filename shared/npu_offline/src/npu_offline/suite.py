"""`pytest --npu-device emulated` for suites without the fixture `npu_place`: every test runs as on an NPU.

Tensors lie on the CPU, kernels are emulated, a test with a finding fails. A test whose kernel is refused, by Triton or by
the emulation, is counted as refused: nothing was said about its results.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from npu_tiling.chips import UnknownDeviceError

from .check.script import npu_on_cpu
from .check.stopped import is_refusal, said_of
from .errors import OfflineError
from .execute.final.findings import WEAK
from .module.places import located

_REFUSED_AT = re.compile(r"(?<=^Triton refuses the kernel) \([^)]*\)")  # reasons are counted without it
_LAUNCHES, _FINDINGS, _REFUSED = "npu_launches", "npu_findings", "npu_refused"


class Suite:
    """A plugin of pytest, from before the collection on: modules ask for a device where they are imported."""

    def __init__(self, soc: str, toolchain: str | None) -> None:
        self._where = f"{soc}, from {f'final modules of {toolchain}' if toolchain else 'Linalg IR'}"
        self._block = contextlib.ExitStack()
        try:
            self._emulation = self._block.enter_context(npu_on_cpu(soc, toolchain=toolchain))
        except (OfflineError, UnknownDeviceError) as error:
            raise pytest.UsageError(str(error)) from None

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if any("npu_place" in getattr(item, "fixturenames", ()) for item in session.items):
            session.config.pluginmanager.unregister(self)
            self._block.close()

    def pytest_unconfigure(self) -> None:
        self._block.close()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        launches = self._emulation.launches
        launches.clear()
        try:
            result = yield
        except BaseException:
            item.add_report_section("call", "npu-offline", self._findings())
            raise
        finally:
            item.user_properties += [(_LAUNCHES, len(launches)), (_FINDINGS, self._findings().splitlines())]
        if found := self._findings():
            pytest.fail(found, pytrace=False)
        return result

    def _findings(self) -> str:
        notes = ((launch, note) for launch in self._emulation.launches for note in launch.notes if note.kind != WEAK)
        return "\n".join(dict.fromkeys(located(f"{launch.kernel}, {note}", launch.ttir) for launch, note in notes))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed and call.excinfo is not None and is_refusal(call.excinfo.value):
            said = said_of(call.excinfo.value)
            report.outcome, report.longrepr = "skipped", (str(item.path), item.location[1] or 0, said)
            report.user_properties.append((_REFUSED, said))
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Refused tests have a category."""
        return ("refused", "R", "REFUSED") if report.skipped and _REFUSED in dict(report.user_properties) else None

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        stats = terminalreporter.stats
        ran = {outcome: stats.get(outcome, ()) for outcome in ("passed", "failed", "refused")}
        tests = [
            {"test": report.nodeid, "outcome": outcome, **_told(report)}
            for outcome, reports in ran.items()
            for report in reports
        ]
        launches = [test["launches"] for test in tests]
        if path := config.getoption("--npu-json"):
            Path(path).write_text(json.dumps(tests, indent=1))
        terminalreporter.section("npu-offline")
        terminalreporter.write_line(f"{sum(launches)} launches in {sum(map(bool, launches))} tests, as on {self._where}")
        reasons = Counter(_REFUSED_AT.sub("", test["refused"].partition("\n")[0]) for test in tests if test["refused"])
        for said, count in reasons.most_common():
            terminalreporter.write_line(f"{count} refused: {said}")


def _told(report: pytest.TestReport) -> dict[str, Any]:
    """What a report says of launches."""
    told = dict(report.user_properties)
    return {"launches": told.get(_LAUNCHES, 0), "findings": told.get(_FINDINGS, []), "refused": told.get(_REFUSED, "")}
