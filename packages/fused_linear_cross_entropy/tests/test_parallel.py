"""A vocabulary split over two processes gives the loss and gradients of the whole one."""

from pathlib import Path

import pytest

from testing import ranks

WORKER = Path(__file__).parent / "vocabulary_worker.py"


@pytest.mark.few(0)
@pytest.mark.slow
@pytest.mark.parametrize("place", ranks.PLACES)
def test_two_ranks_are_one_vocabulary(place):
    ranks.need(place)
    ranks.run(WORKER, 2, place)
