"""FSDP2: two processes that each keep half of the parameters train as one does."""

from pathlib import Path

import pytest

from testing import ranks

WORKER = Path(__file__).parent / "fsdp_worker.py"


@pytest.mark.slow
def test_sharded_models_train_as_whole_ones_do():
    ranks.need("cpu")
    ranks.run(WORKER, 2)
