"""The pytest fixtures of npu-offline where that cannot be installed: the CPU is the only place there is.

npu-offline needs triton-ascend, which has wheels for one Python alone; on the others the packages' tests run with this.
Test files that import it themselves are not collected, and the summary names them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

_IMPORTS = re.compile(r"^(?:from|import) npu_offline\b", re.MULTILINE)
_left_out: list[Path] = []


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if collection_path.suffix == ".py" and _IMPORTS.search(collection_path.read_text()):
        _left_out.append(collection_path)
        return True
    return None


@pytest.fixture
def npu_place() -> SimpleNamespace:
    """The CPU, as npu_offline.plugin.Place describes it."""
    return SimpleNamespace(name="cpu", torch=torch.device("cpu"))


@pytest.fixture
def npu_poisoned() -> Iterator[None]:
    """Memory that torch allocates without a value is full of NaN during the test, which deterministic algorithms do."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def npu_opcheck() -> Callable[..., object]:
    """`torch.library.opcheck`."""
    return torch.library.opcheck


@pytest.fixture
def npu_capture() -> None:
    """Nothing: the test is skipped."""
    pytest.skip("a CPU has no graphs to capture")


@pytest.fixture
def npu_no_waits() -> None:
    """Nothing: the test is skipped."""
    pytest.skip("on a CPU there is no device to wait for")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("places")
    terminalreporter.write_line("cpu: run; emulated, cuda, npu: not run: npu-offline is not installed")
    for path in _left_out:
        terminalreporter.write_line(f"{path.name}: not run: it imports npu-offline")
