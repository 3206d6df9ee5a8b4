"""One of two ranks of test_pipeline.py: the schedules of torch.distributed.pipelining, against one process."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pipeline_stages
import torch
from npu_attn_res import PipelineBlocks
from torch import nn
from torch.distributed import pipelining
from torch.utils.checkpoint import checkpoint

from testing import ranks

N_RANKS = 2
LOOP, V = {0: [0, 2], 1: [1, 3]}, {0: [0, 3], 1: [1, 2]}  # rank: its stages
SCHEDULES = {
    "GPipe": ([1, 1], {0: [0], 1: [1]}, "loop"),
    "1F1B": ([1, 1], {0: [0], 1: [1]}, "loop"),
    "Interleaved1F1B": ([1, 1, 1, 1], LOOP, "loop"),
    "LoopedBFS": ([1, 1, 1, 1], LOOP, "loop"),
    "InterleavedZeroBubble": ([1, 1, 1, 1], LOOP, "loop"),
    "ZBVZeroBubble": ([1, 1, 1, 1], V, "v"),
    "DualPipeV": ([1, 1, 1, 1], V, "v"),
}
SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
# Of inputs and of weights apart: PyTorch 2.11.0 loses the nodes of autograd functions written in Python between the two.
KEEPS_NODES = torch.__version__ >= "2.13"


class Checkpointed(nn.Module):
    """A stage that its backward runs again."""

    def __init__(self, stage):
        super().__init__()
        self.inner = stage

    def forward(self, *message):
        return checkpoint(self.inner, *message, use_reentrant=False)


def train(name, rank, *, checkpointed):
    """Two steps of a schedule; every gradient of the rank's stages is that of one process."""
    made, placement, style = SCHEDULES[name]
    modules, blocks = pipeline_stages.stages(made), PipelineBlocks(made, N_RANKS, style)
    row = torch.zeros(pipeline_stages.TOKENS, pipeline_stages.WIDTH, dtype=torch.float64, requires_grad=True)
    last, stages = len(made) - 1, []
    for module in (modules[i] for i in placement[rank]):
        module.blocks = blocks
        first = row if module.stage else row.detach()
        given = (first, *(row,) * blocks.arriving(module.stage))
        sent = 0 if module.stage == last else blocks.arriving(module.stage + 1)
        result = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        options = {"input_args": given, "output_args": (result,) if module.stage == last else (row,) * (1 + sent)}
        run = Checkpointed(module) if checkpointed else module
        stages.append(pipelining.PipelineStage(run, module.stage, len(made), torch.device("cpu"), **options))
    schedule_type = getattr(pipelining, f"Schedule{name}")
    given = stages[0] if len(stages) == 1 else stages
    options = {"loss_fn": lambda output, target: output[0].sum(), "scale_grads": False}
    schedule = schedule_type(given, pipeline_stages.N_MICROBATCHES, **options)
    whole = torch.cat(pipeline_stages.microbatches())
    target = torch.zeros(pipeline_stages.N_MICROBATCHES, dtype=torch.float64)
    expected = pipeline_stages.whole(made)
    for step in (1, 2):  # gradients add up
        schedule.step(*([whole] if rank == 0 else []), **({"target": target} if last in placement[rank] else {}))
        for i in placement[rank]:
            gradients = pipeline_stages.gradients([modules[i]])
            for gradient, of_one in zip(gradients, pipeline_stages.of_stage(expected, i, made), strict=True):
                torch.testing.assert_close(gradient, step * of_one)


def main():
    with ranks.join() as rank:
        for name in SCHEDULES:
            if hasattr(pipelining, f"Schedule{name}") and (KEEPS_NODES or name not in SPLIT_BACKWARD):
                for checkpointed in (False, True):
                    print(
                        name, "checkpointed" if checkpointed else "plain", flush=True
                    )  # the last one named is that which failed
                    train(name, rank, checkpointed=checkpointed)


main()
