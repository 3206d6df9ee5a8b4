"""DTensors over two processes: the same as whole tensors, or an error that names the placement."""

from __future__ import annotations

import pytest

from .. import ranks
from .case import asked


@pytest.mark.few(0)
@pytest.mark.slow
@asked(table="SHARDED_AT", fixture="place")
def test_shards_are_the_whole(request: pytest.FixtureRequest, place: str) -> None:
    """SHARDED_AT: places where the module's neighbour `sharding_worker.py` runs, which says what is sent."""
    ranks.need(place)
    ranks.run(request.path.with_name("sharding_worker.py"), 2, place)
