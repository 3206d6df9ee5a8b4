"""A table split over two processes trains as the whole one does."""

from pathlib import Path

import pytest
from npu_offline import ranks

WORKER = Path(__file__).parent / "parallel_worker.py"


@pytest.mark.slow
@pytest.mark.parametrize("place", ranks.PLACES)
def test_two_ranks_are_one_table(place):
    ranks.need(place)
    ranks.run(WORKER, 2, place)
