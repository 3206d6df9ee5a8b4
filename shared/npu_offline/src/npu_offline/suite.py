"""`pytest --npu-device emulated` for suites without the fixture `npu_place`: every test runs as on an NPU.

Tensors lie on the CPU, kernels are emulated, a test with a finding fails. A test whose kernel is refused, by Triton or by
the emulation, is counted as refused: nothing was said about its results.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest
from npu_tiling.chips import UnknownDeviceError

from .check.script import npu_on_cpu
from .check.stopped import is_refusal, said_of
from .errors import OfflineError
from .execute.final.findings import WEAK

_LAUNCHES, _REFUSED = "npu_launches", "npu_refused"


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
            item.user_properties.append((_LAUNCHES, len(launches)))
        if found := self._findings():
            pytest.fail(found, pytrace=False)
        return result

    def _findings(self) -> str:
        notes = ((launch.kernel, note) for launch in self._emulation.launches for note in launch.notes)
        return "\n".join(dict.fromkeys(f"{kernel}, {note}" for kernel, note in notes if note.kind != WEAK))

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

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        stats = terminalreporter.stats
        launches = [
            count
            for outcome in ("passed", "failed", "refused")
            for report in stats.get(outcome, ())
            for name, count in report.user_properties
            if name == _LAUNCHES
        ]
        terminalreporter.section("npu-offline")
        terminalreporter.write_line(f"{sum(launches)} launches in {sum(map(bool, launches))} tests, as on {self._where}")
        reasons = Counter(dict(report.user_properties)[_REFUSED].partition("\n")[0] for report in stats.get("refused", ()))
        for said, count in reasons.most_common():
            terminalreporter.write_line(f"{count} refused: {said}")
