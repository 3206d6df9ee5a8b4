"""DTensors over two processes: the same as whole tensors, with nothing sent, or an error that names the placement."""

from pathlib import Path

import pytest
from npu_offline import ranks

WORKER = Path(__file__).parent / "sharding_worker.py"


@pytest.mark.slow
@pytest.mark.skipif(ranks.why_not() is not None, reason=str(ranks.why_not()))
def test_shards_are_the_whole_and_nothing_is_sent():
    ranks.run(WORKER, 2)
