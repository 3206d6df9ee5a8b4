"""Four stages that make a block each, the same in every process, and what one process computes with them."""

import torch
from npu_attn_res import attn_res_bank
from torch import nn

MADE, WIDTH, TOKENS, N_MICROBATCHES = [1, 1, 1, 1], 16, 6, 4


class Stage(nn.Module):
    def __init__(self, stage):
        super().__init__()
        torch.manual_seed(stage)
        self.stage, self.blocks = stage, None
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.weights = nn.ParameterList([torch.randn(WIDTH, dtype=torch.float64) for _ in range(3)])

    def run(self, blocks, prefix):
        """Two layers, and a block made of the first one's input."""
        found = attn_res_bank(blocks, None, prefix, *self.weights)
        blocks.append(self.linear(found.prefix))
        first = torch.tanh(self.linear(found.normalized))
        found = attn_res_bank(blocks, None, first, *self.weights, layer_output=found.output)
        return found.prefix + torch.tanh(self.linear(found.normalized))

    def forward(self, prefix, *received):
        blocks = self.blocks.enter(self.stage, received)
        prefix = self.run(blocks, prefix)
        sent = self.blocks.leave(self.stage, blocks)
        return (prefix, *sent) if self.stage < len(MADE) - 1 else (prefix.square().sum().view(1),)


def stages():
    return [Stage(i) for i in range(len(MADE))]


def microbatches():
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=generator) for _ in range(N_MICROBATCHES)]


def gradients(modules):
    return [parameter.grad for module in modules for parameter in module.parameters()]


def whole():
    """The gradients of all parameters, by one process with one list of blocks."""
    modules = stages()
    for x in microbatches():
        blocks, prefix = [], x
        for module in modules:
            prefix = module.run(blocks, prefix)
        prefix.square().sum().backward()
    return gradients(modules)
