"""The page on post-training: what its head under FSDP2 sends, on two ranks."""

from pathlib import Path

import pytest

from testing import ranks

WORKER = Path(__file__).parent / "post_training_worker.py"


@pytest.mark.slow
def test_a_head_that_computes_its_loss_is_gathered_once_for_all_chunks():
    ranks.need("cpu")
    ranks.run(WORKER, 2, "cpu")
