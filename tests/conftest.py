"""Makes what is not a package of its own, tools and causal_lms.py, importable by tests; the wheels that they share."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]


@pytest.fixture(scope="session")
def of_all_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of a run share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def built(of_all_processes: Path) -> Path:
    """A folder with the sdist and the wheel of every package, built once for all processes of a run."""
    from tools import wheels

    return wheels.build_once(of_all_processes / "wheels")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch on one thread: for tensors so small that waiting for a second one is most of the time."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def device(npu_place):
    """The place a test runs at, under the name that these tests use."""
    return npu_place
