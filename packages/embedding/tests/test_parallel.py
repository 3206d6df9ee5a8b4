"""A table split over two processes trains as the whole one does."""

from pathlib import Path

import pytest
from npu_offline import ranks
from npu_offline.plugin import why_not

WORKER = Path(__file__).parent / "parallel_worker.py"


@pytest.mark.slow
@pytest.mark.skipif(ranks.why_not() is not None, reason=str(ranks.why_not()))
@pytest.mark.parametrize("place", ["cpu", "emulated"])
def test_two_ranks_are_one_table(place):
    reason = why_not(place)
    if reason:
        pytest.skip(reason)
    ranks.run(WORKER, 2, place)
