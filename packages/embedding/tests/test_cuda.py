"""CUDA's kernels in Triton's interpreter: the look-up, and each way to a gradient. On a GPU all tests run these kernels."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from interpreted_lookups import BAGS, CASES, LONG_BAGS, NGRAMS

from testing import forks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton's interpreter"),
]


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.nightly) for part in (1, 2, 3))])
def test_look_ups_and_gradients(part):
    names = [*CASES, *NGRAMS, *BAGS, *LONG_BAGS][part::4]
    worker = Path(__file__).with_name("interpreted_lookups.py")
    done = forks.run(worker, *names, environment={**os.environ, "TRITON_INTERPRET": "1"}, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split("\n")[:-1] == [f"right: {name}" for name in names]
