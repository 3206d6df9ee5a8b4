"""Several processes compute as one: the demo's model under FSDP2, and operators over a mesh of two dimensions."""

from __future__ import annotations

from pathlib import Path

import pytest

from testing import ranks

WORKER = Path(__file__).parent / "distributed_worker.py"


@pytest.mark.slow
@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_ranks_train_and_compute_as_one_process(count, place):
    ranks.need(place, count)
    ranks.run(WORKER, count, place)
