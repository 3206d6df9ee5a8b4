"""Megatron's own GPTModel with our loss, against the same model with Megatron's."""

from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from testing import ranks  # noqa: E402

WORKER = Path(__file__).parent / "megatron_worker.py"


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_losses_and_gradients_are_those_of_megatron(count):
    ranks.need("cpu", count)
    ranks.run(WORKER, count, "cpu")
