"""What may import what, and that a breach is found."""

from __future__ import annotations

import configparser
import subprocess
import sys

import pytest

from tools import import_contracts
from tools.workspace import ROOT, read_packages

ONE, OTHER = "npu_one", "npu_other"


def lint(folder, sections):
    """import-linter's exit status and what it says."""
    config = configparser.ConfigParser()
    config.read_dict(sections)
    with (folder / "contracts.ini").open("w") as opened:
        config.write(opened)
    command = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports('contracts.ini', no_cache=True))"
    sources = ":".join(str(source) for source in sorted(folder.glob("*/*/src")))
    environment = {"PYTHONPATH": sources, "PATH": ""}
    return subprocess.run([sys.executable, "-c", command], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture
def workspace(tmp_path):
    """Two operators, the core and a development package, with the rooms that the contracts speak of."""
    for name in ("npu-one", "npu-other", "npu-tiling", "npu-offline"):
        module = name.replace("-", "_")
        folder = tmp_path / ("packages" if module in (ONE, OTHER) else "shared") / module
        source = folder / "src" / module
        source.mkdir(parents=True)
        (folder / "pyproject.toml").write_text(f'[project]\nname = "{name}"\nversion = "0"\nrequires-python = ">=3.10"\n')
        for room in ("__init__", "module", "autograd", "operators", "launch", "reference", "tiling", "kernels"):
            (source / f"{room}.py").write_text("")
    return tmp_path


def test_packages_keep_the_contracts():
    command = [sys.executable, "-m", "tools.import_contracts"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("KEPT") == 6


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        (None, "", None),
        (f"packages/{ONE}/src/{ONE}/module.py", f"import {OTHER}", "Operators do not import each other"),
        (f"packages/{ONE}/src/{ONE}/launch.py", "import npu_offline", "Operators import no development package"),
        (f"packages/{ONE}/src/{ONE}/kernels.py", "import torch", "Device code imports no PyTorch"),
        (f"packages/{ONE}/src/{ONE}/tiling.py", "def f():\n    import triton", "Tiling imports neither"),
        (f"packages/{ONE}/src/{ONE}/tiling.py", "from . import launch", "Data flows one way"),
        (f"packages/{ONE}/src/{ONE}/launch.py", "from . import autograd", "Data flows one way"),
        (f"packages/{ONE}/src/{ONE}/reference.py", "from . import tiling", "Data flows one way"),
        ("shared/npu_tiling/src/npu_tiling/__init__.py", "import triton", "The core imports nothing of ours"),
        ("shared/npu_tiling/src/npu_tiling/__init__.py", "import npu_offline", "The core imports nothing of ours"),
    ],
)
def test_breach_is_found(workspace, file, line, broken):
    if file:
        (workspace / file).write_text(line + "\n")
    sections = import_contracts.contracts(read_packages(workspace).values(), workspace)
    done = lint(workspace, sections)
    assert done.returncode == (1 if broken else 0), done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if "BROKEN" in line and (broken or "") in line] or not broken
