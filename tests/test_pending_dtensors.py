"""DTensors whose collective has not ended, as PyTorch's tensor-parallel styles hand them on, get the gradients of others."""

from pathlib import Path

import pytest

from testing import ranks

WORKER = Path(__file__).with_name("pending_worker.py")


@pytest.mark.slow
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_gradients_of_pending_dtensors_are_those_of_waited_ones(place):
    ranks.need(place)
    ranks.run(WORKER, 2, place)
