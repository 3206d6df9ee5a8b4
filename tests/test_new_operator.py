"""A rendered operator package is in order, builds, and passes its own tests, on the emulated NPU too."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile

import pytest

from tools import import_contracts, new_operator, wheels
from tools.workspace import ROOT, read_packages

NAME = "gated_linear_sum_of_squares"  # long: lines must not outgrow the limit


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A root with the rendered package beside nothing."""
    root = tmp_path_factory.mktemp("workspace")
    new_operator.render(NAME, root / "packages" / NAME)
    return root


def run(*command, cwd, **variables):
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _modules(folder):
    """Names of modules, each a file or a folder."""
    return {path.stem for path in folder.iterdir() if path.suffix or (path / "__init__.py").exists()}


MODULES = {"__init__", "__main__", "api", "ascend", "cuda", "explain", "formula", "operator", "py", "reference"}  # py.typed


def test_every_module_is_there(workspace):
    folder = workspace / "packages" / NAME
    model = ROOT / "packages" / "rms_norm"
    found = _modules(folder / "src" / f"npu_{NAME}")
    assert found == MODULES and found <= _modules(model / "src" / "npu_rms_norm")
    tracked = {path.name for path in model.iterdir() if path.name[0] not in "._"}
    assert {path.name for path in folder.iterdir()} == tracked - {"dist"}
    assert "{{" not in "".join(path.read_text() for path in folder.rglob("*") if path.is_file())


@pytest.mark.nightly
@pytest.mark.slow
def test_style_and_types(workspace):
    folder = workspace / "packages" / NAME
    run(sys.executable, "-m", "ruff", "check", "--config", ROOT / "ruff.toml", folder, cwd=ROOT)
    run(sys.executable, "-m", "ruff", "format", "--check", "--config", ROOT / "ruff.toml", folder, cwd=ROOT)
    source = folder / "src"
    run(sys.executable, "-m", "mypy", "--config-file", ROOT / ".mypy.ini", source, cwd=ROOT, MYPYPATH=str(source))


def test_metadata_is_that_of_the_other_operators(workspace):
    package, model = read_packages(workspace)[NAME], read_packages()["rms_norm"]
    assert package.requires == model.requires
    assert (package.extras, package.tests) == (model.extras, model.tests)
    assert package.python == model.python
    sections = import_contracts.contracts([package, read_packages()["npu_tiling"]], workspace)
    (kernels,) = (section for section in sections.values() if section.get("name", "").startswith("Pages of kernels"))
    assert set(kernels["source_modules"].split()) == {f"npu_{NAME}.{page}" for page in ("ascend", "cuda", "formula")}


@pytest.mark.slow
@pytest.mark.compilers
def test_wheel_passes_the_packages_tests(workspace, tmp_path):
    package = read_packages(workspace)[NAME]
    with zipfile.ZipFile(wheels.build(package, tmp_path, workspace)) as wheel:
        wheel.extractall(tmp_path / "installed")
    tests = workspace / package.folder / "tests"
    options = ["-q", "-c", str(ROOT / "pytest.ini"), "--rootdir", str(workspace), "-p", "testing.plugin"]
    command = [sys.executable, "-m", "pytest", *options, str(tests)]
    said = run(*command, cwd=workspace, PYTHONPATH=f"{tmp_path / 'installed'}:{ROOT}", OMP_NUM_THREADS="1")
    assert "cpu: run" in said
    try:
        import npu_offline
    except ImportError:
        return
    if npu_offline.installed():
        assert "emulated: run" in said


@pytest.mark.parametrize("name", ["SwiGLU", "2d", "a-b", "_x", "rms_norm"])
def test_name_that_cannot_be_used_is_refused(name, capsys):
    with pytest.raises(SystemExit, match="2"):
        new_operator.main([name])
    assert name in capsys.readouterr().err
