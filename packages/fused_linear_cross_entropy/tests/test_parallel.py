"""A vocabulary split over two processes gives the loss and gradients of the whole one."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed
from npu_offline.plugin import why_not

WORKER = Path(__file__).parent / "vocabulary_worker.py"


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch was built without gloo")
@pytest.mark.parametrize("place", ["cpu", "emulated"])
def test_two_ranks_are_one_vocabulary(place, tmp_path):
    reason = why_not(place)
    if reason:
        pytest.skip(reason)
    command = [sys.executable, str(WORKER)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2", str(tmp_path / "store"), place],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        out, error = rank.communicate(timeout=240)
        assert rank.returncode == 0, error[-3000:]
        assert out.strip().endswith("ok")
