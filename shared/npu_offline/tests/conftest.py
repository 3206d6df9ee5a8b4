import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest
from npu_offline.toolchain import cache
from npu_offline.toolchain import compilers as toolchains

from testing import forks

sys.path.insert(0, str(Path(__file__).parent))  # sample_kernels.py, which pytest's importlib mode leaves out


@pytest.fixture(autouse=True, scope="module")
def _all_toolchains(request):
    if request.path.name.startswith("test_cann"):  # they ask for the one that runs
        return
    missing = set(toolchains.VERSIONS) - set(toolchains.installed())
    if missing:
        pytest.skip(f"toolchains are missing: npu-offline fetch {' '.join(sorted(missing))}")


@pytest.hookimpl(tryfirst=True)  # before cases are left to the night
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("compilers")


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own with the toolchains in it and nothing else."""
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "toolchains").symlink_to(cache.cache_dir() / "toolchains")
    monkeypatch.setenv("NPU_OFFLINE_CACHE", str(folder))
    return folder


RUN = ["-c", "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"]


@pytest.fixture
def forking(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Runs pytest in a process that has imported PyTorch, as tests that have a place do."""

    def popen(command: tuple[str, ...], stdin: object, stdout: IO[bytes], stderr: IO[bytes], **_: object) -> forks.Fork:
        assert command[:2] == (sys.executable, "-mpytest")
        return forks.start([*RUN, *command[2:]], stdout, stderr)

    monkeypatch.setattr(pytester, "popen", popen)
    monkeypatch.setattr(forks.Fork, "stdin", None, raising=False)
    return pytester


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], str]:
    """Writes a file with the kernels of user_kernels.py, and a last statement."""
    from user_kernels import KERNELS

    def make(last: str = "") -> str:
        path = tmp_path / "kernels.py"
        path.write_text(KERNELS.replace("NEWEST", last))
        return str(path)

    return make
