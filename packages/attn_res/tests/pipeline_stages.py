"""Stages that make a block each, the same in every process, and what one process computes with them."""

import torch
from npu_attn_res import attn_res_bank
from torch import nn

MADE, WIDTH, TOKENS, N_MICROBATCHES = [1, 1, 1, 1], 16, 6, 4


class Stage(nn.Module):
    """Two layers. `gives_prefix`: PipelineBlocks gets the prefix too.

    Each parameter is read once: PyTorch's backward of weights alone frees nodes between two uses of a parameter.
    """

    def __init__(self, stage, n_stages, gives_prefix=True):
        super().__init__()
        torch.manual_seed(stage)
        self.stage, self.n_stages, self.gives_prefix, self.blocks = stage, n_stages, gives_prefix, None
        self.linears = nn.ModuleList([nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3)])
        self.weights = nn.ParameterList([torch.randn(WIDTH, dtype=torch.float64) for _ in range(6)])

    def run(self, blocks, prefix):
        """Two layers, and a block made of the first one's input."""
        found = attn_res_bank(blocks, None, prefix, *self.weights[:3])
        blocks.append(self.linears[0](found.prefix))
        first = torch.tanh(self.linears[1](found.normalized))
        found = attn_res_bank(blocks, None, first, *self.weights[3:], layer_output=found.output)
        return found.prefix + torch.tanh(self.linears[2](found.normalized))

    def forward(self, prefix, *received):
        blocks = self.blocks.enter(self.stage, received, prefix if self.gives_prefix else None)
        prefix = self.run(blocks, prefix)
        if self.gives_prefix:
            prefix, *sent = self.blocks.leave(self.stage, blocks, prefix)
        else:
            sent = self.blocks.leave(self.stage, blocks)
        return (prefix, *sent) if self.stage < self.n_stages - 1 else (prefix.square().sum().view(1),)


class Unread(Stage):
    """A stage whose layers read no block, its own neither."""

    def run(self, blocks, prefix):
        blocks.append(self.linears[0](prefix))
        return prefix + torch.tanh(self.linears[1](prefix))


def stages(made=MADE, gives_prefix=True, unread=()):
    return [(Unread if i in unread else Stage)(i, len(made), gives_prefix) for i in range(len(made))]


def microbatches():
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=generator) for _ in range(N_MICROBATCHES)]


def gradients(modules):
    return [parameter.grad for module in modules for parameter in module.parameters()]


def of_stage(gradients, stage, made=MADE):
    """Those of one stage's parameters, out of all stages'."""
    each = len(gradients) // len(made)
    return gradients[stage * each : (stage + 1) * each]


def whole(made=MADE, unread=()):
    """The gradients of all parameters, by one process with one list of blocks."""
    modules = stages(made, unread=unread)
    for x in microbatches():
        blocks, prefix = [], x
        for module in modules:
            prefix = module.run(blocks, prefix)
        prefix.square().sum().backward()
    return gradients(modules)
