"""Makes what is not a package of its own, tools, importable by tests; the wheels that they share."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel of every package."""
    from tools import wheels
    from tools.workspace import read_packages

    folder = tmp_path_factory.mktemp("wheels")
    for package in read_packages().values():
        wheels.build(package, folder)
    return folder
