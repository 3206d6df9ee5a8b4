"""CUDA's launches of a gradient with a sort, ours and torch.sort, in Triton's interpreter.

The emulator of Ascend has no histograms, and its masked stores read what they leave out. On a GPU the operator's tests run
these kernels.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from ranks_worker import CASES

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton's interpreter")


@pytest.mark.parametrize("part", [0, 1])
def test_gradients_of_sorted_indices(part):
    names = list(CASES)[part::2]
    worker = Path(__file__).with_name("ranks_worker.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, worker, *names], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split("\n")[:-1] == [f"right: {name}" for name in names]
