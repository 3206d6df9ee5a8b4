"""A table split over processes, each with indices of its own, trains as the whole one does on all of them."""

from pathlib import Path

import pytest

from testing import ranks

WORKER = Path(__file__).parent / "parallel_worker.py"


@pytest.mark.few(0)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "count"), [("cpu", 2), pytest.param("cpu", 4, marks=pytest.mark.nightly), ("emulated", 2), ("cuda", 2)]
)
def test_ranks_are_one_table(place, count):
    ranks.need(place, count)
    ranks.run(WORKER, count, place)
