"""One of two ranks of test_pipeline.py: interleaved stages of torch.distributed.pipelining."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pipeline_stages
import torch
from npu_attn_res import PipelineBlocks
from npu_offline import ranks
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

N_RANKS = 2


def main() -> None:
    with ranks.join() as rank:
        modules, blocks, made = pipeline_stages.stages(), PipelineBlocks(pipeline_stages.MADE, N_RANKS), []
        row = torch.zeros(pipeline_stages.TOKENS, pipeline_stages.WIDTH, dtype=torch.float64, requires_grad=True)
        last = len(modules) - 1
        for module in modules[rank::N_RANKS]:
            module.blocks = blocks
            first = row if module.stage else row.detach()
            given = (first, *(row,) * blocks.arriving(module.stage))
            results = (torch.zeros(1, dtype=torch.float64, requires_grad=True),) if module.stage == last else (row, row)
            options = {"input_args": given, "output_args": results}
            made.append(PipelineStage(module, module.stage, len(modules), torch.device("cpu"), **options))
        schedule = ScheduleInterleaved1F1B(
            made, pipeline_stages.N_MICROBATCHES, loss_fn=lambda output, target: output[0].sum(), scale_grads=False
        )
        whole = torch.cat(pipeline_stages.microbatches())
        target = torch.zeros(pipeline_stages.N_MICROBATCHES, dtype=torch.float64)
        if rank == 0:
            schedule.step(whole)
        else:
            schedule.step(target=target)
        expected = pipeline_stages.whole()
        each = len(expected) // len(modules)
        for module in modules[rank::N_RANKS]:
            of_module = expected[module.stage * each : (module.stage + 1) * each]
            for one, other in zip(pipeline_stages.gradients([module]), of_module, strict=True):
                torch.testing.assert_close(one, other)


main()
