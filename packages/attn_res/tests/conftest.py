import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # depth.py, which pytest's importlib mode leaves out


@pytest.fixture
def device(npu_place):
    """The place a test runs at, under the name that these tests use."""
    return npu_place
