"""DTensors over two processes: the loss of whole tensors and of parts made by hand, or an error that names the placement."""

from pathlib import Path

import pytest

from testing import ranks

WORKER = Path(__file__).parent / "sharding_worker.py"


@pytest.mark.slow
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_shards_are_the_whole_and_what_process_groups_give(place):
    ranks.need(place)
    ranks.run(WORKER, 2, place)
