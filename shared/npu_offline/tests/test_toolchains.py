"""Compiler versions: fetched into a cache folder, found there, or missing with the command that helps."""

import subprocess
from pathlib import Path

import npu_tiling
import pytest
from npu_offline import OfflineError, ToolchainMissingError, compile_kernel, emulate, fetch, installed, supported
from npu_offline import toolchains as module


@pytest.fixture
def nothing_there(tmp_path, monkeypatch):
    monkeypatch.setenv("NPU_OFFLINE_CACHE", str(tmp_path))
    return tmp_path


def _fake_pip(monkeypatch, fail=False):
    calls = []

    def run(command, **_):
        calls.append(command)
        target = Path(command[command.index("--target") + 1])
        (target / "ascendnpuir" / "bin").mkdir(parents=True)
        return subprocess.CompletedProcess(command, int(fail), "", "no such version")

    monkeypatch.setattr(module.subprocess, "run", run)
    return calls


def test_fetch_installs_with_pip_once(nothing_there, monkeypatch):
    calls = _fake_pip(monkeypatch)
    (folder,) = fetch(["1.1.0"])
    assert calls[0][-1] == "ascendnpu-ir==1.1.0"
    assert "--no-deps" in calls[0]
    assert fetch(["1.1.0"]) == [folder]
    assert len(calls) == 1
    assert installed() == ("1.1.0",)


def test_fetch_that_fails_leaves_nothing(nothing_there, monkeypatch):
    _fake_pip(monkeypatch, fail=True)
    with pytest.raises(OfflineError, match=r"ascendnpu-ir==1\.0\.0:\nno such version"):
        fetch(["1.0.0"])
    assert list((nothing_there / "toolchains").iterdir()) == []
    assert installed() == ()


def test_fetch_beside_another_process(nothing_there, monkeypatch):
    def run(command, **_):
        (nothing_there / "toolchains" / "1.2.0" / "ascendnpuir").mkdir(parents=True)  # the other one was faster
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(module.subprocess, "run", run)
    (folder,) = fetch(["1.2.0"])
    assert (folder / "ascendnpuir").is_dir()
    assert [entry.name for entry in folder.parent.iterdir()] == ["1.2.0"]


def test_missing_toolchain_names_the_command(nothing_there):
    with pytest.raises(ToolchainMissingError, match=r"run `npu-offline fetch 1\.1\.0`"), emulate(toolchain="1.1.0"):
        pass
    with pytest.raises(ToolchainMissingError, match=r"run `npu-offline fetch 1\.0\.0`"):
        supported("Ascend910B4", "1.0.0")


def test_unknown_version_is_refused():
    with pytest.raises(OfflineError, match=r"toolchain is '2\.0', must be one of 1\.0\.0, 1\.1\.0, 1\.2\.0"):
        fetch(["2.0"])


def test_unknown_chip_is_refused():
    with pytest.raises(npu_tiling.UnknownDeviceError):
        supported("Ascend1", "1.2.0")
    with pytest.raises(npu_tiling.UnknownDeviceError), emulate("Ascend1"):
        pass


def test_what_each_version_supports():
    known = {version: {soc for soc in npu_tiling.SOCS if supported(soc, version)} for version in module.VERSIONS}
    old = {soc for soc, chip in npu_tiling.SOCS.items() if chip.arch == "dav-c220"} - {"Ascend910_9363"}
    new = {soc for soc, chip in npu_tiling.SOCS.items() if chip.arch == "dav-c310"}
    assert known == {"1.0.0": old, "1.1.0": old | new, "1.2.0": old | new}


def test_missing_c_compiler_is_named(monkeypatch):
    from npu_offline import native

    monkeypatch.setenv("CC", "")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ToolchainMissingError, match="needs a C compiler"):
        native.c_compiler()
    assert "needs a C compiler" in native.missing_c_compiler()


def test_chosen_c_compiler_is_used(monkeypatch):
    from npu_offline import native

    monkeypatch.setenv("CC", "cc -g0")
    assert native.c_compiler() == ["cc", "-g0"]


def test_package_imports_without_triton(tmp_path):
    for name in ("triton", "xdsl", "torch"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} must not be imported')")
    import os
    import sys

    done = subprocess.run(
        [sys.executable, "-c", "import npu_offline"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )
    assert done.returncode == 0, done.stderr
    assert compile_kernel
