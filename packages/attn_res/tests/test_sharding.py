"""DTensors over two processes: the same as whole tensors, with nothing sent, or an error that names the placement."""

from pathlib import Path

import pytest

from testing import ranks

WORKER = Path(__file__).parent / "sharding_worker.py"


@pytest.mark.few(0)
@pytest.mark.slow
@pytest.mark.parametrize("place", ranks.PLACES)
def test_shards_are_the_whole_and_nothing_is_sent(place):
    ranks.need(place)
    ranks.run(WORKER, 2, place)
