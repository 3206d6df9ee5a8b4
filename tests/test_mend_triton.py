"""Environments with stock Triton and triton-ascend, made by pip from small wheels, and mended."""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pip as pip_of_this
import pytest
from npu_tiling import doctor as installation

from tools import mend_triton, wheels
from tools.workspace import ROOT

pytestmark = pytest.mark.slow
# What stands in a wheel's place: files that both have, and a back end of each, which only its own files can import.
_ALL_BACKENDS = "import importlib, pkgutil\nfor found in pkgutil.iter_modules(__path__):\n"
FILES = {
    name: {
        "triton/__init__.py": f"from . import backends\n{kind} = 1\n",
        "triton/backends/__init__.py": _ALL_BACKENDS + "    importlib.import_module(f'{__name__}.{found.name}')\n",
        "triton/backends/compiler.py": f"{kind} = 1\n",
        f"triton/backends/{kind}.py": f"from .compiler import {kind}\n",
    }
    for name, kind in (("triton", "stock"), ("triton-ascend", "ascend"))
}
FILES["triton-ascend"]["triton/backends/ascend.py"] += "import pybind11\n"  # which its metadata do not ask for
FILES["pybind11"] = {"pybind11.py": ""}
BOTH = [{"name": "triton", "version": "3.7.1"}, {"name": "triton-ascend", "version": installation.TRITON_ASCEND}]
PYBIND11 = {"name": "pybind11", "version": "3.1.0"}
DOES_IT_WORK = "import triton; triton.ascend"


def write_wheel(folder, name, version, requires=()):
    module = re.sub(r"[-_.]+", "_", name)
    information = f"{module}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = FILES.get(name, {}) | {
        f"{information}/METADATA": metadata + "".join(f"Requires-Dist: {text}\n" for text in requires),
        f"{information}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        record = [f"{path},sha256={digest(text)},{len(text)}\n" for path, text in files.items()]
        archive.writestr(f"{information}/RECORD", "".join(record) + f"{information}/RECORD,,\n")


def digest(text):
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


@pytest.fixture
def index(tmp_path, monkeypatch):
    """Makes a folder the only place where pip finds anything: wheels with next to nothing in them."""

    def make(distributions):
        folder = tmp_path / "index"
        folder.mkdir()
        for each in (*distributions, PYBIND11):
            write_wheel(folder, each["name"], each["version"], each.get("requires", ()))
        for variable, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(folder)), ("PIP_CONFIG_FILE", "/dev/null")):
            monkeypatch.setenv(variable, value)
        monkeypatch.delenv("PYTHONPATH", raising=False)
        return wheels.Environment(tmp_path / "environment")

    return make


def pip(environment, *arguments):
    command = [environment.python, Path(pip_of_this.__file__).with_name("__pip-runner__.py"), *arguments]
    subprocess.run([*command, "--disable-pip-version-check"], check=True, capture_output=True)


def works(environment):
    return subprocess.run([environment.python, "-I", "-c", DOES_IT_WORK], capture_output=True).returncode == 0


def test_triton_ascend_alone_is_left_where_torch_brought_triton(index):
    torch = {"name": "torch", "version": "2.13.0", "requires": ["triton==3.7.1"]}
    environment = index([torch, *BOTH])
    pip(environment, "install", "torch", "triton-ascend")
    assert environment.installed() == {"torch", "triton", "triton-ascend"} and not works(environment)
    assert "both installed" in mend_triton.mend(environment.python)
    assert works(environment)
    assert environment.installed() == {"torch", "triton-ascend", "pybind11"}


@pytest.mark.parametrize("first", ["triton", "triton-ascend"])
def test_either_may_have_come_first(first, index):
    environment = index(BOTH)
    for name in sorted(("triton", "triton-ascend"), key=lambda name: name != first):
        pip(environment, "install", name)
    assert not works(environment)
    mend_triton.mend(environment.python)
    assert works(environment)
    assert mend_triton.mend(environment.python) == ""


def test_what_an_uninstalled_triton_took_with_it_is_put_back(index):
    environment = index(BOTH)
    pip(environment, "install", "triton", "triton-ascend")
    pip(environment, "uninstall", "-y", "triton")
    assert not works(environment)
    assert "is damaged" in mend_triton.mend(environment.python)
    assert works(environment)


def test_a_command_that_fails_is_an_error_with_what_pip_said(index):
    environment = index(BOTH[:1])
    pip(environment, "install", "triton")
    with pytest.raises(RuntimeError, match=r"(?s)triton-ascend==.* failed:.*No matching distribution"):
        mend_triton.mend(environment.python)


def test_every_command_that_may_import_triton_begins_with_mending():
    scripts = tomllib.loads((ROOT / "hatch.toml").read_text())["envs"]["default"]["scripts"]
    import_none = {"lint", "types", "format", "imports", "new-operator"}

    def first(command):
        lines = [command] if isinstance(command, str) else command
        line = next(line for line in lines if not line.startswith("pip install"))
        return first(scripts[line.split()[0]]) if line.split()[0] in scripts else line

    assert {name for name in scripts if first(scripts[name]) != scripts["mend-triton"]} == import_none
