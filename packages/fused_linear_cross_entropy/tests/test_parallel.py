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


@pytest.mark.few(0)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "count"),
    [("cpu", 2), ("cpu", 4), ("emulated", 2), pytest.param("emulated", 4, marks=pytest.mark.nightly), ("cuda", 2)],
)
def test_fixed_parts_of_a_vocabulary_have_the_bits_of_any_number_of_ranks(place, count):
    ranks.need(place, count)
    ranks.run(Path(__file__).parent / "parts_worker.py", count, place)
