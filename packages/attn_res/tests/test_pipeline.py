"""Blocks in a pipeline: sent to a rank once and kept for its later stages."""

from pathlib import Path

import pipeline_stages
import pytest
import torch
from npu_attn_res import PipelineBlocks
from npu_offline import ranks

WORKER = Path(__file__).parent / "pipeline_worker.py"


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
def test_gradients_are_those_of_one_process(n_ranks):
    """Stages run one after the other here; what would be sent is cut from the graph and its gradient passed on."""
    expected = pipeline_stages.whole()
    stages = pipeline_stages.stages()
    caches = [PipelineBlocks(pipeline_stages.MADE, n_ranks) for _ in range(n_ranks)]
    for stage in stages:
        stage.blocks = caches[stage.stage % n_ranks]
    runs = []
    for x in pipeline_stages.microbatches():
        message, run = (x,), []
        for stage in stages:
            assert len(message) - 1 == caches[0].arriving(stage.stage)
            given = [one.detach().requires_grad_() for one in message]
            message = stage(*given)
            run.append((given, message))
        runs.append(run)
    for run in reversed(runs):
        (*_, (_, (loss,))) = run
        upstream = [torch.ones_like(loss)]
        for given, message in reversed(run):
            torch.autograd.backward(message, upstream)
            upstream = [one.grad for one in given]
    for one, other in zip(pipeline_stages.gradients(stages), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_rank_is_sent_what_it_lacks():
    made = [1, 2, 0, 1, 3, 1]
    assert [PipelineBlocks(made, 2).arriving(stage) for stage in range(6)] == [0, 1, 2, 0, 1, 3]
    assert [PipelineBlocks(made, 3).arriving(stage) for stage in range(6)] == [0, 1, 3, 2, 1, 4]
    assert [PipelineBlocks(made, 1).arriving(stage) for stage in range(6)] == [0] * 6


REFUSED = {
    "received has 1 blocks and must have 0": lambda blocks: blocks.enter(0, [torch.zeros(3)]),
    "stage is 2 and must come after stage 0": lambda blocks: blocks.enter(2, [torch.zeros(3)]),
    "stage is 4 and must be below": lambda blocks: blocks.enter(4, []),
    "blocks has 3 blocks and must have 2": lambda blocks: blocks.leave(1, [torch.zeros(3)] * 3),
}


@pytest.mark.parametrize("message", REFUSED)
def test_misuse_is_named(message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message](PipelineBlocks([1, 1, 1, 1], 2))


@pytest.mark.slow
def test_two_ranks_train_four_stages_as_one_process_does():
    ranks.run(WORKER, 2)
