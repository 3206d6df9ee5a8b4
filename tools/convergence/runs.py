"""One training run, and how well the model predicts text that it is not trained on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..demo.blocks import PLAIN, Blocks
from ..demo.training import Setup, build, loss_of, text

PRECISIONS = ("fp32", "bf16", "autocast")
EVERY = 10  # steps from one measurement on the held-out text to the next
_HELD_OUT = 0.05  # of the text, its end
_HELD_OUT_WINDOWS = 32


@dataclass(frozen=True)
class Curve:
    """What became of one run.

    Attributes:
        name: the blocks', and what else is particular.
        training: the loss of each step, on that step's windows.
        held_out: the loss on the held-out text after every `EVERY` steps, as plain PyTorch in fp32 computes it from the
            parameters: the same measure for every run.
        seconds: that the run took.
    """

    name: str
    training: list[float] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)
    seconds: float = 0.0


def windows(setup: Setup, order: int) -> Tensor:
    """The text of each step, bytes [steps, batch, context + 1], drawn with the seed `order`; never of the held-out end."""
    corpus = text()
    end = int(len(corpus) * (1 - _HELD_OUT)) - setup.context
    generator = torch.Generator().manual_seed(order)
    start = torch.randint(end, (setup.steps, setup.batch, 1), generator=generator)
    return corpus[start + torch.arange(setup.context + 1)]


def held_out(setup: Setup) -> Tensor:
    """Windows [count, context + 1] that cover the held-out end of the text evenly: the same for every run."""
    corpus = text()
    first = int(len(corpus) * (1 - _HELD_OUT))
    start = torch.linspace(first, len(corpus) - setup.context - 1, _HELD_OUT_WINDOWS).long().unsqueeze(1)
    return corpus[start + torch.arange(setup.context + 1)]


def train(
    setup: Setup,
    blocks: Blocks,
    device: torch.device,
    precision: str,
    *,
    order: int = 0,
    backend: str | None = None,
    on_step: Callable[[int], None] = lambda step: None,
) -> tuple[list[float], list[float]]:
    """The losses of a run: of every step, and on the held-out text after every `EVERY` steps.

    Args:
        precision: "fp32"; "bf16": parameters, activations and the optimizer's state; "autocast": fp32 parameters, matrix
            products in bf16.
        order: the seed of the order of the data; the initial parameters are the setup's own.
        backend: of torch.compile, through which forward and backward then go, in one graph; None: eagerly.
        on_step: told the number of each step that is done.
    """
    model = build(setup, blocks, device)
    if precision == "bf16":
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=setup.learning_rate, betas=(0.9, 0.95))
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / setup.warm_up))
    loss_function: Any = loss_of
    if backend is not None:
        loss_function = torch.compile(loss_of, fullgraph=True, dynamic=False, backend=backend)
    judge, unseen = build(setup, PLAIN, device), held_out(setup).to(device)
    training, measured = [], []
    for step, batch in enumerate(windows(setup, order)):
        with _cast(device, precision):
            loss = loss_function(model, batch.to(device))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        warm_up.step()
        training.append(loss.detach())
        if (step + 1) % EVERY == 0:
            judge.load_state_dict(model.state_dict())
            with torch.no_grad():
                measured.append(loss_of(judge, unseen))
        on_step(step)
    return [loss.item() for loss in training], [loss.item() for loss in measured]


def _cast(device: torch.device, precision: str) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "autocast")
