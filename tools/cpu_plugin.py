"""The fixture `npu_place` where npu-offline cannot be installed: the CPU is the only place there is.

npu-offline needs triton-ascend, which has wheels for one Python alone; on the others the packages' tests run with this.
Test files that import it themselves are not collected, and the summary names them.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

_IMPORTS = re.compile(r"^(?:from|import) (?:npu_offline|testing\.ascend)\b", re.MULTILINE)
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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("places")
    terminalreporter.write_line("cpu: run; emulated, cuda, npu: not run: npu-offline is not installed")
    for path in _left_out:
        terminalreporter.write_line(f"{path.name}: not run: it imports npu-offline")
