"""Blocks in a pipeline: sent to a rank once and kept for its later stages."""

from pathlib import Path

import pipeline_stages
import pytest
import torch
from npu_attn_res import PipelineBlocks
from torch.distributed.pipelining import _utils
from torch.utils.checkpoint import checkpoint

from testing import ranks

WORKER = Path(__file__).parent / "pipeline_worker.py"


def connect(stages, n_ranks, style="loop"):
    """Gives every stage its rank's PipelineBlocks, and returns those."""
    caches = [PipelineBlocks([1] * len(stages), n_ranks, style) for _ in range(n_ranks)]
    placed = _utils.generate_stage_to_rank_mapping(n_ranks, len(stages), style)
    for stage in stages:
        stage.blocks = caches[placed[stage.stage]]
    return caches


def forward(stages, x):
    """Stages run one after the other here; what would be sent is cut from the graph."""
    message, run = (x,), []
    for stage in stages:
        given = [tensor.detach().requires_grad_() for tensor in message]
        message = stage(*given)
        run.append((given, message))
    return run


def backward(run):
    upstream = [torch.ones_like(run[-1][1][0])]
    for given, message in reversed(run):
        torch.autograd.backward(message, upstream)
        upstream = [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in given]


def step(stages):
    runs = [forward(stages, x) for x in pipeline_stages.microbatches()]
    for run in reversed(runs):
        backward(run)


def same(modules, expected):
    for gradient, other in zip(pipeline_stages.gradients(modules), expected, strict=True):
        if gradient is None or other is None:  # of a layer that is not run
            assert gradient is other
        else:
            torch.testing.assert_close(gradient, other)


@pytest.mark.parametrize("gives_prefix", [False, True])
@pytest.mark.parametrize(("n_ranks", "style"), [(1, "loop"), (2, "loop"), (3, "loop"), (4, "loop"), (2, "v"), (4, "v")])
def test_gradients_are_those_of_one_process(n_ranks, style, gives_prefix):
    stages = pipeline_stages.stages(gives_prefix=gives_prefix)
    connect(stages, n_ranks, style)
    step(stages)
    same(stages, pipeline_stages.whole())


@pytest.mark.parametrize(("n_ranks", "style"), [(1, "loop"), (2, "loop"), (2, "v")])
def test_a_stage_that_reads_no_block_passes_their_gradients_on(n_ranks, style):
    unread = (0, 1, 2)
    stages = pipeline_stages.stages(unread=unread)
    connect(stages, n_ranks, style)
    step(stages)
    same(stages, pipeline_stages.whole(unread=unread))


def test_a_gradient_that_no_backward_takes_is_an_error():
    """Stage 0 neither reads nor sends its block, and gives no prefix: nothing carries the block's gradient."""
    stages = pipeline_stages.stages(gives_prefix=False, unread=(0,))
    connect(stages, 1)
    backward(forward(stages, pipeline_stages.microbatches()[0]))
    with pytest.raises(ValueError, match=r"gradients of blocks \[0\] of stage 0, which it has kept for stage 1, were lost"):
        forward(stages, pipeline_stages.microbatches()[1])


@pytest.mark.parametrize("gives_prefix", [False, True])
def test_a_backward_of_inputs_alone_reaches_kept_blocks_or_fails(gives_prefix):
    """Stage 2 of a V receives no block: without the prefix its blocks depend on none of its inputs."""
    stages = pipeline_stages.stages(gives_prefix=gives_prefix)
    connect(stages, 2, "v")
    run = forward(stages, pipeline_stages.microbatches()[0])
    upstream = [torch.ones_like(run[-1][1][0])]
    for stage in (3, 2):
        given, message = run[stage]
        upstream = torch.autograd.grad(message, given, upstream, retain_graph=True)
    given, message = run[1]
    if gives_prefix:
        assert all(gradient is not None for gradient in torch.autograd.grad(message, given, upstream))
    else:
        with pytest.raises(ValueError, match=r"prefix must be given to enter\(2, ...\)"):
            torch.autograd.grad(message, given, upstream)


def test_an_earlier_stages_backward_that_comes_first_is_an_error():
    stages = pipeline_stages.stages()
    connect(stages, 2)
    run = forward(stages, pipeline_stages.microbatches()[0])
    torch.autograd.backward(run[0][1], [torch.ones_like(tensor) for tensor in run[0][1]])
    with pytest.raises(ValueError, match="the backward of stage 2 must come before that of stage 0"):
        torch.autograd.backward(run[2][1], [torch.ones_like(tensor) for tensor in run[2][1]])


class Checkpointed(torch.nn.Module):
    def __init__(self, stage, use_reentrant):
        super().__init__()
        self.stage, self.use_reentrant = stage, use_reentrant

    def forward(self, *message):
        return checkpoint(self.stage, *message, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize(("n_ranks", "style"), [(1, "loop"), (2, "loop"), (2, "v")])
def test_whole_stages_may_be_checkpointed(n_ranks, style):
    stages = pipeline_stages.stages()
    connect(stages, n_ranks, style)
    step([Checkpointed(stage, use_reentrant=False) for stage in stages])
    same(stages, pipeline_stages.whole())


def test_blocks_without_gradient_reach_a_checkpointed_stage():
    """Stage 0 is frozen: no graph holds its block."""
    expected, stages = pipeline_stages.whole(), pipeline_stages.stages()
    stages[0].requires_grad_(False)
    connect(stages, 2)
    wrapped = [Checkpointed(stage, use_reentrant=False) for stage in stages]
    for x in pipeline_stages.microbatches():
        message, run = (x,), []
        for stage in wrapped:
            given = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in message]
            message = stage(*given)
            run.append((given, message))
        upstream = [torch.ones_like(message[0])]
        for given, message in reversed(run[1:]):
            torch.autograd.backward(message, upstream)
            upstream = [tensor.grad for tensor in given]
    same(stages[1:], [gradient for i in (1, 2, 3) for gradient in pipeline_stages.of_stage(expected, i)])


def test_reentrant_checkpoints_are_refused():
    stages = pipeline_stages.stages()
    connect(stages, 2)
    with pytest.raises(ValueError, match="use_reentrant=False"):
        backward(forward([Checkpointed(stage, use_reentrant=True) for stage in stages], pipeline_stages.microbatches()[0]))


def test_reset_forgets_a_step_that_was_not_finished():
    stages = pipeline_stages.stages()
    caches = connect(stages, 2)
    aborted = forward(stages[:2], torch.full((pipeline_stages.TOKENS, pipeline_stages.WIDTH), 1e3, dtype=torch.float64))
    del aborted
    for cache in caches:
        cache.reset()
    step(stages)
    same(stages, pipeline_stages.whole())


def test_nothing_is_kept_after_a_step():
    stages = pipeline_stages.stages()
    caches = connect(stages, 2)
    run = forward(stages, pipeline_stages.microbatches()[0])
    backward(run)
    assert not any(queue for cache in caches for queue in cache._kept.values())
    del run
    assert not any(kept() for cache in caches for entered in cache._entered for kept in entered.values())


def test_evaluation_needs_no_gradients():
    stages = pipeline_stages.stages()
    connect(stages, 2)
    with torch.no_grad():
        (loss,) = forward(stages, pipeline_stages.microbatches()[0])[-1][1]
    assert loss.isfinite() and not loss.requires_grad


def test_a_rank_is_sent_what_it_lacks():
    made = [1, 2, 0, 1, 3, 1]
    assert [PipelineBlocks(made, 2).arriving(stage) for stage in range(6)] == [0, 1, 2, 0, 1, 3]
    assert [PipelineBlocks(made, 3).arriving(stage) for stage in range(6)] == [0, 1, 3, 2, 1, 4]
    assert [PipelineBlocks(made, 1).arriving(stage) for stage in range(6)] == [0] * 6
    assert [PipelineBlocks(made, 2, "v").arriving(stage) for stage in range(6)] == [0, 1, 0, 2, 0, 4]
    assert [PipelineBlocks(made, 3, "v").arriving(stage) for stage in range(6)] == [0, 1, 3, 0, 1, 6]


REFUSED = {
    "received has 1 blocks and must have 0": lambda blocks: blocks.enter(0, [torch.zeros(3)]),
    "stage is 2 and must come after stage 0": lambda blocks: blocks.enter(2, [torch.zeros(3)]),
    "stage is 4 and must be below": lambda blocks: blocks.enter(4, []),
    "blocks has 3 blocks and must have 2": lambda blocks: blocks.leave(1, [torch.zeros(3)] * 3),
    "style is 'w' and must be one of": lambda blocks: PipelineBlocks([1], 1, "w"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_misuse_is_named(message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message](PipelineBlocks([1, 1, 1, 1], 2))


@pytest.mark.slow
def test_two_ranks_train_as_one_process_does():
    """Under every schedule that this torch has, with plain stages and with checkpointed ones."""
    ranks.run(WORKER, 2)
