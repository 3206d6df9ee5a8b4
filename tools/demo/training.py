"""Trains one model, always on the same batches."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .blocks import PLAIN, Blocks
from .model import Config, LanguageModel


@dataclass(frozen=True)
class Setup:
    """What both runs share.

    The learning rate keeps training well inside its stable range. At twice the rate the loss ends no lower, and two
    runs that differ in rounding alone soon drift apart tenfold every 30 steps.
    """

    model: Config = field(default_factory=Config)
    steps: int = 200
    batch: int = 8
    context: int = 128
    learning_rate: float = 1e-3
    warm_up: int = 30
    seed: int = 0


def text() -> Tensor:
    """English text that comes with every CPython: the language reference behind `help()`, about 460 KB, as bytes."""
    topics: dict[str, str] = pydoc_data.topics.topics
    return torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)


def batches(setup: Setup) -> Tensor:
    """The windows of text of each step: bytes [steps, batch, context + 1]."""
    corpus = text()
    generator = torch.Generator().manual_seed(setup.seed)
    start = torch.randint(len(corpus) - setup.context, (setup.steps, setup.batch, 1), generator=generator)
    return corpus[start + torch.arange(setup.context + 1)]


def initial_state(setup: Setup) -> dict[str, Tensor]:
    """The parameters that both models start from."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(setup.seed)
        return LanguageModel(setup.model, PLAIN).state_dict()


def build(setup: Setup, blocks: Blocks, device: torch.device) -> LanguageModel:
    """A model of these blocks with the initial parameters."""
    model = LanguageModel(setup.model, blocks)
    model.load_state_dict(initial_state(setup))
    return model.to(device)


def loss_of(model: LanguageModel, windows: Tensor) -> Tensor:
    """Mean cross entropy of the next byte over windows [batch, context + 1], in nats."""
    windows = windows.long()
    return model.loss(windows[:, :-1], windows[:, 1:])


def train(setup: Setup, blocks: Blocks, device: torch.device, on_step: Callable[[int, float], None]) -> list[float]:
    """The loss of every step, which `on_step` is told too."""
    model = build(setup, blocks, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=setup.learning_rate, betas=(0.9, 0.95))
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / setup.warm_up))
    losses = []
    for step, windows in enumerate(batches(setup)):
        loss = loss_of(model, windows.to(device))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        warm_up.step()
        losses.append(loss.item())
        on_step(step, losses[-1])
    return losses
