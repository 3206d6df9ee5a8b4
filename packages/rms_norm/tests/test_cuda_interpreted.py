"""CUDA's kernels, all but the one whose programs wait for one another, in Triton's interpreter: no GPU is needed.

The interpreter runs whichever Triton is installed, stock Triton or triton-ascend.
"""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from testing import forks


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton's interpreter")
def test_kernels_of_cuda_compute_the_definition():
    worker = Path(__file__).with_name("cuda_worker.py")
    done = forks.run(worker, environment={**os.environ, "TRITON_INTERPRET": "1"}, timeout=900)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]
