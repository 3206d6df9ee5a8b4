"""Steps of training: their speed, memory and loss, and how much of their collectives other kernels hide."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .measuring import wait
from .overlap import profiled

_WARM_UP, _STEPS = 4, 8


class Steps:
    """Steps of training a sharded model on random tokens.

    Args:
        model: a module after `fully_shard`.
        loss: of tokens [batch, length].
        rank, device: of this process.
        vocabulary: how many tokens there are.
        tiny: few tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Tensor], Tensor],
        rank: int,
        device: torch.device,
        vocabulary: int,
        tiny: bool,
    ) -> None:
        self._loss, self._rank, self._device, self._vocabulary = loss, rank, device, vocabulary
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
        self._generator = torch.Generator(device).manual_seed(rank)
        self._batch = (2, 16 if tiny else 4096)

    def step(self) -> Tensor:
        """One step; returns its loss."""
        tokens = torch.randint(0, self._vocabulary, self._batch, generator=self._generator, device=self._device)
        loss = self._loss(tokens)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def measured(self) -> dict[str, Any]:
        """Tokens a second of all ranks, the peak of this rank's memory in GiB, the last loss, and `overlap.shares`."""
        for _ in range(_WARM_UP):
            self.step()
        wait(self._device)
        is_cuda = self._device.type == "cuda"
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
        start, last = time.perf_counter(), torch.zeros(())
        for _ in range(_STEPS):
            last = self.step()
        wait(self._device)
        rate = _STEPS * math.prod(self._batch) * dist.get_world_size() / (time.perf_counter() - start)
        peak = torch.cuda.max_memory_allocated() / 2**30 if is_cuda else 0.0
        return {
            "tokens_per_second": rate,
            "peak_gib": peak,
            "loss": last.float().item(),
            **profiled(self.step, self._rank, self._device),
        }
