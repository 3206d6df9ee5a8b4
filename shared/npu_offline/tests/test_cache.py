"""What the package keeps on disk: made again where it is damaged, cleaned, and nobody else's to change."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from npu_offline import CompilationError, OfflineError, compile_kernel, emulate
from npu_offline.cli import main
from npu_offline.execute import native
from npu_offline.toolchain import cache, processes
from sample_kernels import expf

SIGNATURE = {"x_ptr": "*fp32", "y_ptr": "*fp32"}


def damage(path):
    path.write_bytes(path.read_bytes()[:-2])


@pytest.fixture
def own(tmp_path, monkeypatch):
    folder = tmp_path / "own"
    monkeypatch.setenv("NPU_OFFLINE_CACHE", str(folder))
    return folder


def test_damaged_reports_are_made_again(empty_cache):
    def report():
        return compile_kernel(expf, SIGNATURE, {"BN": 256})

    first = report()
    kept = [*(empty_cache / "reports").iterdir(), *(empty_cache / "linalg").iterdir()]
    assert len(kept) == 2
    before = [path.read_bytes() for path in kept]
    for path in kept:
        damage(path)
    assert report() == first
    assert [path.read_bytes() for path in kept] == before
    kept[0].write_bytes(b"")
    assert report() == first


@pytest.mark.nightly
def test_damaged_runtime_is_made_again(empty_cache):
    code = "from npu_offline.execute import native; native.runtime()"
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code], check=True)
        (path,) = (empty_cache / "runtime").iterdir()
        whole = path.read_bytes()
        damage(path)
    subprocess.run([sys.executable, "-c", code], check=True)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("damaged", [b"", b"[2]", b"[1]" + b"0" * 64])
def test_only_what_its_digest_is_of_is_read(own, damaged):
    path = own / "reports" / "one.json"
    assert cache.checked(path, lambda: b"[2]") == b"[2]"
    assert cache.checked(path, lambda: b"[3]") == b"[2]"
    path.write_bytes(damaged)
    assert cache.checked(path, lambda: b"[4]") == b"[4]"


def test_folders_are_the_users_alone(own):
    before = os.umask(0)
    try:
        folder = cache.private_folder("loading")
    finally:
        os.umask(before)
    assert (folder.stat().st_mode & 0o777, own.stat().st_mode & 0o777) == (0o700, 0o700)
    folder.chmod(0o755)
    assert cache.private_folder("loading").stat().st_mode & 0o777 == 0o700
    own.chmod(0o777)
    with pytest.raises(OfflineError, match="can be written by everybody"):
        cache.private_folder("loading")


def test_kernels_are_loaded_from_a_private_folder(empty_cache, monkeypatch):
    loaded = []
    open_library = native.ctypes.CDLL

    def seen(name, *arguments, **options):
        loaded.append(str(name))
        return open_library(name, *arguments, **options)

    monkeypatch.setattr(native.ctypes, "CDLL", seen)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(empty_cache / "triton"))
    y = torch.empty(64)
    with emulate():
        expf[(1,)](torch.zeros(64), y, BN=64)
    assert y.eq(1).all()
    kernels = [name for name in loaded if name.startswith("/")]
    assert kernels
    assert all(name.startswith((str(empty_cache / "loading"), str(empty_cache / "runtime"))) for name in kernels)
    assert list((empty_cache / "loading").iterdir()) == []


def test_one_linalg_ir_is_made_ready_to_run_once_for_all_chips(empty_cache, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(empty_cache / "triton"))
    for soc in ("Ascend910B1", "Ascend910B2"):
        with emulate(soc):
            expf[(1,)](torch.zeros(32), torch.empty(32), BN=32)
    assert len(list((empty_cache / "triton").rglob("*.npubin"))) == 2
    assert len(list((empty_cache / "objects").iterdir())) == 1


def test_clean_leaves_the_compilers(own, capsys):
    cache.write_atomically(own / "reports" / "one.json", b"x" * 1_500_000)
    cache.write_atomically(own / "toolchains" / "1.2.0" / "manifest.json", b"{}")
    assert main(["cache"]) == 0
    assert "1.5 MB  reports" in capsys.readouterr().out
    assert main(["cache", "clean"]) == 0
    assert "1.5 MB removed" in capsys.readouterr().out
    assert [path.name for path in own.iterdir()] == ["toolchains"]
    assert main(["cache", "clean", "--toolchains"]) == 0
    assert list(own.iterdir()) == []
    assert main(["cache", "clean"]) == 0


def test_a_program_that_does_not_end_is_stopped_and_named():
    with pytest.raises(CompilationError, match=r"sleep was stopped: it took more than 0\.2 s"):
        processes.run(["sleep", "60"], seconds=0.2)


def test_every_program_is_run_with_a_limit():
    source = Path(cache.__file__).parents[1]
    starts = re.compile(r"subprocess\.(run|call|check_\w+|Popen)\(")
    files = [file for file in source.rglob("*.py") if starts.search(file.read_text())]
    assert files == [Path(processes.__file__)], "all others use processes.run"


def test_doctor_names_what_is_missing(own, capsys, monkeypatch):
    monkeypatch.setenv("CC", "")
    monkeypatch.setenv("PATH", "")
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "    npu-offline fetch 1.2.0" in said
    assert "needs a C compiler" in said
