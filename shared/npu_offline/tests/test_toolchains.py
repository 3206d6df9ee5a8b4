"""Compiler versions: fetched into a cache folder, found there, or missing with the command that helps."""

import hashlib
import re
import shutil
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import npu_tiling
import pytest
from npu_offline import OfflineError, ToolchainMissingError, compile_kernel, emulate, fetch, installed, supported
from npu_offline.toolchain import compilers as module


@pytest.fixture
def nothing_there(tmp_path, monkeypatch):
    monkeypatch.setenv("NPU_OFFLINE_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def pip(monkeypatch, tmp_path):
    """What stands in pip's place: brings a wheel with one program, whose digest is the one that is known."""
    made = tmp_path / "made.whl"
    with zipfile.ZipFile(made, "w") as archive:
        program = zipfile.ZipInfo("ascendnpu_ir-1.0.data/purelib/ascendnpuir/bin/bishengir-compile")
        program.external_attr = 0o100755 << 16
        archive.writestr(program, "#!/bin/sh\necho compiled\n")
        archive.writestr("ascendnpuir/lib/meta_op.bc", "what the program links")
        archive.writestr("ascendnpuir/__init__.py", "raise SystemExit('nothing of the wheel runs before it is checked')\n")
    digest = hashlib.sha256(made.read_bytes()).hexdigest()
    monkeypatch.setattr(
        module, "WHEELS", {version: dict.fromkeys(("x86_64", "aarch64"), digest) for version in module.VERSIONS}
    )
    state = SimpleNamespace(calls=[], required=[], wheel=made, status=0, before=lambda: None)

    def run(command, **_):
        state.calls.append(command)
        state.required.append(Path(command[command.index("--requirement") + 1]).read_text())
        state.before()
        if not state.status:
            shutil.copy(state.wheel, Path(command[command.index("--dest") + 1]) / "ascendnpu_ir-1.0-cp311-cp311-linux.whl")
        return subprocess.CompletedProcess(command, state.status, "", "no such version")

    monkeypatch.setattr(module, "run", run)
    module._tool.cache_clear()
    yield state
    module._tool.cache_clear()


def test_fetch_downloads_a_wheel_of_a_known_digest_once(nothing_there, pip):
    (folder,) = fetch(["1.1.0"])
    assert {"download", "--require-hashes", "--only-binary=:all:", "--no-deps"} <= set(pip.calls[0])
    assert pip.required == [f"ascendnpu-ir==1.1.0 --hash=sha256:{module.WHEELS['1.1.0']['x86_64']}\n"]
    assert fetch(["1.1.0"]) == [folder]
    assert len(pip.calls) == 1
    assert installed() == ("1.1.0",)
    assert [entry.name for entry in folder.parent.iterdir()] == ["1.1.0"]
    program = module.tool("1.1.0", "bishengir-compile")
    assert subprocess.run([program], capture_output=True, text=True).stdout == "compiled\n"
    assert not (folder / "ascendnpuir" / "__init__.py").stat().st_mode & 0o111


def test_digests_are_known_for_every_version_and_machine():
    assert set(module.WHEELS) == set(module.VERSIONS)
    digests = [digest for wheels in module.WHEELS.values() for digest in wheels.values()]
    assert len(set(digests)) == 2 * len(module.VERSIONS)
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_wheel_is_the_machines_own(nothing_there, pip, monkeypatch, machine):
    other = {"x86_64": "aarch64", "aarch64": "x86_64"}[machine]
    module.WHEELS["1.2.0"][other] = "0" * 64
    monkeypatch.setattr(module.platform, "machine", lambda: machine)
    fetch(["1.2.0"])
    assert module.WHEELS["1.2.0"][machine] in pip.required[0]
    assert "0" * 64 not in pip.required[0]
    assert installed() == ("1.2.0",)


def test_machine_without_wheels_is_named(nothing_there, pip, monkeypatch):
    monkeypatch.setattr(module.platform, "machine", lambda: "riscv64")
    with pytest.raises(OfflineError, match="wheels for Linux on x86_64, aarch64, and this is Linux on riscv64"):
        fetch(["1.2.0"])
    assert not pip.calls


def test_another_wheel_is_not_unpacked(nothing_there, pip, tmp_path):
    other = tmp_path / "other.whl"
    other.write_bytes(pip.wheel.read_bytes() + b" ")
    pip.wheel = other
    with pytest.raises(OfflineError, match="is not the wheel of ascendnpu-ir 1.0.0"):
        fetch(["1.0.0"])
    assert installed() == ()
    assert list((nothing_there / "toolchains").iterdir()) == []


def test_fetch_that_fails_leaves_nothing(nothing_there, pip):
    pip.status = 1
    with pytest.raises(OfflineError, match=r"ascendnpu-ir==1\.0\.0:\nno such version"):
        fetch(["1.0.0"])
    assert list((nothing_there / "toolchains").iterdir()) == []
    assert installed() == ()


def test_fetch_beside_another_process(nothing_there, pip):
    def other():
        pip.before = lambda: None
        fetch(["1.2.0"])

    pip.before = other  # while pip runs for the first, a second one fetches and is done
    (folder,) = fetch(["1.2.0"])
    assert module.damaged("1.2.0") is None
    assert [entry.name for entry in folder.parent.iterdir()] == ["1.2.0"]


@pytest.mark.parametrize("what", ["empty", "no manifest", "of another wheel", "removed", "changed", "library changed"])
def test_half_a_toolchain_is_none_and_is_fetched_again(nothing_there, pip, what):
    folder = nothing_there / "toolchains" / "1.2.0"
    program = folder / "ascendnpuir" / "bin" / "bishengir-compile"
    if what == "empty":
        folder.mkdir(parents=True)
    else:
        fetch(["1.2.0"])
    if what == "no manifest":
        (folder / "manifest.json").unlink()
    if what == "of another wheel":
        manifest = (folder / "manifest.json").read_text()
        (folder / "manifest.json").write_text(manifest.replace(module.WHEELS["1.2.0"]["x86_64"], "0" * 64))
    if what == "removed":
        program.unlink()
    if what == "changed":
        program.write_text("#!/bin/sh\necho something else\n")
    if what == "library changed":
        (folder / "ascendnpuir" / "lib" / "meta_op.bc").write_text("something else")
    assert module.damaged("1.2.0")
    assert installed() == (("1.2.0",) if "changed" in what else ())  # whose content is compared when it is used
    with pytest.raises(ToolchainMissingError, match=r"run `npu-offline fetch 1\.2\.0`"):
        module.tool("1.2.0", "bishengir-compile")
    fetch(["1.2.0"])
    assert module.damaged("1.2.0") is None
    assert module.tool("1.2.0", "bishengir-compile") == program


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
    from npu_offline.execute import c_compiler

    monkeypatch.setenv("CC", "")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ToolchainMissingError, match="needs a C compiler"):
        c_compiler.c_compiler()
    assert "needs a C compiler" in c_compiler.missing_c_compiler()


def test_chosen_c_compiler_is_used(monkeypatch):
    from npu_offline.execute import c_compiler

    monkeypatch.setenv("CC", "cc -g0")
    assert c_compiler.c_compiler() == ["cc", "-g0"]


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
