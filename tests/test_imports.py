"""What may import what, and that a breach is found."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys

import pytest

from tools import import_contracts, layers
from tools.workspace import ROOT, read_packages

ONE, OTHER = "npu_one", "npu_other"
TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
TILING, OFFLINE = "shared/npu_tiling/src/npu_tiling", "shared/npu_offline/src/npu_offline"


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


KERNEL = "import torch\n@triton.jit\ndef kernel(): ..."
MODULES = {
    "npu-one": ("module", "api", "operator", "plans", "reference", "tiling", "formula"),
    "npu-other": ("api",),
    "npu-tiling": ("dispatch", "launch", "chips", "device"),
    "npu-offline": (
        "bounds/kernel",
        "commands",
        "timing",
        "lint",
        "execute/emulation",
        "execute/native",
        "module",
        "errors",
    ),
}


@pytest.fixture
def workspace(tmp_path):
    """Two operators, the core and a development package, with some of the modules that the contracts name."""
    for name, modules in MODULES.items():
        module = name.replace("-", "_")
        folder = tmp_path / ("packages" if module in (ONE, OTHER) else "shared") / module
        source = folder / "src" / module
        source.mkdir(parents=True)
        (folder / "pyproject.toml").write_text(f'[project]\nname = "{name}"\nversion = "0"\nrequires-python = ">=3.10"\n')
        for file in ("__init__", *modules):
            path = source / f"{file}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text("")
            (path.parent / "__init__.py").touch()
    return tmp_path


def test_packages_keep_the_contracts():
    command = [sys.executable, "-m", "tools.import_contracts"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("KEPT") == 9 + len(layers.FOLDERS)


def test_every_name_in_a_layer_is_a_module():
    packages = {package.module: package for package in read_packages().values()}
    operators = [name for name, package in packages.items() if package.is_operator]
    known = [
        (operators, layers.OPERATOR),
        (["npu_tiling"], layers.CORE),
        *(([name], order) for name, order in layers.FOLDERS.items()),
    ]
    for folders, order in known:
        sources = [ROOT / packages[name.partition(".")[0]].folder / "src" / name.replace(".", "/") for name in folders]
        there = {path.stem for source in sources for path in source.glob("*") if path.suffix in ("", ".py")}
        if order is layers.OPERATOR:  # a new operator's modules
            there |= {path.name.partition(".")[0] for path in (ROOT / "tools/template/files/src").glob("*/*.jinja")}
        assert {name for layer in order for name in re.findall(r"\w+", layer)} <= there


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        (None, "", None),
        (f"packages/{ONE}/src/{ONE}/module.py", f"import {OTHER}", "Operators do not import each other"),
        (f"packages/{ONE}/src/{ONE}/plans.py", "import npu_offline", "Operators import no development package"),
        (
            f"packages/{ONE}/src/{ONE}/formula.py",
            "import torch\n@triton.jit\ndef kernel(): ...",
            "Pages of kernels import no PyTorch",
        ),
        (f"packages/{ONE}/src/{ONE}/formula.py", "from npu_tiling.device import widen", None),
        (f"{TILING}/device.py", "import triton", None),
        (f"{TILING}/device.py", "from . import chips", "device imports nothing else"),
        (f"{TILING}/launch.py", "import triton", "Of the core device alone"),
        (f"packages/{ONE}/src/{ONE}/reference.py", "from . import operator", "Data flows one way"),
        (f"packages/{ONE}/src/{ONE}/more.py", "", "Data flows one way"),  # a module in no layer
        (f"{TILING}/chips.py", "from . import launch", "Layers of npu_tiling"),
        (f"{OFFLINE}/lint.py", TYPES + "    from . import commands", "Layers of npu_offline"),
        (f"{OFFLINE}/execute/native.py", "def f():\n    from . import emulation", "Layers of npu_offline.execute"),
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


def test_circle_is_found_below_the_layers(workspace):
    folder = workspace / OFFLINE / "timing"
    (folder.with_suffix(".py")).unlink()
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "one.py").write_text("from . import other\n")
    (folder / "other.py").write_text("from . import one\n")
    done = lint(workspace, import_contracts.contracts(read_packages(workspace).values(), workspace))
    assert [line for line in done.stdout.splitlines() if "BROKEN" in line] == ["No circles BROKEN"]
