"""DTensors over two processes: the same as whole tensors, with nothing sent unless both are split, or an error by name."""

from pathlib import Path

import pytest

from testing import ranks

WORKER = Path(__file__).parent / "sharding_worker.py"


@pytest.mark.slow
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_shards_are_the_whole(place):
    ranks.need(place)
    ranks.run(WORKER, 2, place)
