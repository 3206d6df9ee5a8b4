"""DTensors over two processes: the same as whole tensors, with nothing sent, or an error that names the placement."""

from pathlib import Path

import pytest
from npu_offline import ranks
from npu_offline.plugin import why_not

WORKER = Path(__file__).parent / "sharding_worker.py"


@pytest.mark.slow
@pytest.mark.skipif(ranks.why_not() is not None, reason=str(ranks.why_not()))
@pytest.mark.parametrize("place", ["cpu", "emulated"])
def test_shards_are_the_whole_and_nothing_is_sent(place):
    reason = why_not(place)
    if reason:
        pytest.skip(reason)
    ranks.run(WORKER, 2, place)
