"""One of two ranks of test_fsdp.py: small models under FSDP2 (`fully_shard`), each beside the same model in one piece."""

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import decoder
import pipeline_stages
import torch
import torch.distributed as dist
from npu_attn_res import BlockAttnRes, PipelineBlocks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from testing import ranks

STEPS, BATCH, WIDTH = 4, 4, 32


class DepthLayer(nn.Module):
    """Takes the depth, adds its outputs to it, and returns the last one, which FSDP2 waits for in the backward."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = (nn.Linear(width, width, dtype=torch.float64) for _ in range(2))

    def forward(self, depth):
        depth.add(torch.tanh(self.first(depth.input())))
        output = torch.tanh(self.second(depth.input()))
        depth.add(output)
        return output


class DepthModel(nn.Module):
    """Embedding, layers on a depth that is the model's own, and logits over the same table."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, WIDTH, dtype=torch.float64)
        self.layers = nn.ModuleList([DepthLayer(WIDTH) for _ in range(3)])
        self.attention = BlockAttnRes(WIDTH, 7, 2, dtype=torch.float64)
        nn.init.normal_(self.attention.query)

    def forward(self, tokens):
        depth = self.attention.start(self.embedding(tokens))
        for layer in self.layers:
            layer(depth)
        return depth.input() @ self.embedding.weight.T


class Checkpointed(decoder.Decoder):
    def forward(self, tokens):
        return super().forward(tokens, functools.partial(checkpoint, use_reentrant=False))


def train(model, tokens):
    """The losses of some steps of plain gradient descent: Adam would make much of a gradient that is rounding alone."""
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    losses = []
    for _ in range(STEPS):
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def same_parameters(sharded, whole):
    for (name, part), expected in zip(sharded.named_parameters(), whole.parameters(), strict=True):
        assert part.to_local().numel() < expected.numel(), name
        torch.testing.assert_close(part.full_tensor(), expected.detach(), msg=lambda said, name=name: f"{name}: {said}")


def check_training(make, rank, mesh):
    """Each rank's half of a batch, averaged, is the whole batch: losses, and parameters at the end."""
    tokens = torch.randint(50, (BATCH, 9), generator=torch.Generator().manual_seed(0))
    whole, sharded = make(), make()
    for layer in sharded.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    losses, own = train(whole, tokens), train(sharded, tokens.chunk(2)[rank])
    dist.all_reduce(own)
    torch.testing.assert_close(own / 2, losses)
    assert losses[-1] < losses[0] - 0.1
    same_parameters(sharded, whole)


def check_pipeline_blocks(rank, mesh):
    """Stages that share a `PipelineBlocks`, each sharded, forward and backward as a schedule of one rank has them."""
    stages, expected = pipeline_stages.stages(), pipeline_stages.whole()
    blocks = PipelineBlocks(pipeline_stages.MADE, 1)
    for stage in stages:
        stage.blocks = blocks
        fully_shard(stage, mesh=mesh)
    for x in pipeline_stages.microbatches():
        runs, prefix = [], x.chunk(2)[rank]
        for stage in stages:
            given = prefix.detach().requires_grad_()
            (prefix,) = stage(given)
            runs.append((given, prefix))
        upstream = torch.ones(1, dtype=torch.float64)
        for given, result in reversed(runs):
            result.backward(upstream.view(result.shape))
            upstream = given.grad
    parameters = [parameter for stage in stages for parameter in stage.parameters()]
    for parameter, gradient in zip(parameters, expected, strict=True):
        assert parameter.to_local().numel() < parameter.numel()
        torch.testing.assert_close(2 * parameter.grad.full_tensor(), gradient)  # FSDP2's is the ranks' mean


def main():
    with ranks.join() as rank:
        mesh = init_device_mesh("cpu", (2,))  # where there is a GPU, FSDP2 would take it
        for make in (decoder.Decoder, Checkpointed, DepthModel):
            check_training(make, rank, mesh)
        check_pipeline_blocks(rank, mesh)


main()
