"""Operators whose vocabulary is split over the ranks, beside the whole vocabulary on each rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from npu_embedding import VocabParallelEmbedding, embedding
from npu_fused_linear_cross_entropy import fused_linear_cross_entropy, linear_log_probs
from torch import Tensor

from .measuring import attempt, wait

# Tokens, width and vocabulary.
SHAPES = ((512, 256, 1001), (1024, 4096, 128256), (8192, 4096, 128256))
TINY = ((64, 32, 1001),)
_WARM_UP, _SAMPLES = 3, 7
_SAMPLE_SECONDS = 0.1

Shape = tuple[int, int, int]
Step = Callable[[], Any]
Make = Callable[..., tuple[Step, Step]]


def measure(rank: int, device: torch.device, *, tiny: bool) -> Iterator[dict[str, Any]]:
    """Milliseconds of each operator's call with gradients, on one rank and on all: the slowest rank's median."""
    dtype = torch.float32 if tiny else torch.bfloat16
    for shape in TINY if tiny else SHAPES:
        for name, make in (("loss", _loss), ("log-probabilities", _log_probs), ("embedding", _embedding)):
            tokens, width, vocabulary = shape
            yield attempt(f"{name} {tokens} x {width} x {vocabulary}", partial(_both, make, rank, device, dtype, shape))


def _both(make: Make, rank: int, device: torch.device, dtype: torch.dtype, shape: Shape) -> dict[str, float]:
    with device:  # tensors are made there; steps run outside of it, since it slows every call of PyTorch on the host
        one, split = make(rank, dist.get_world_size(), dtype, *shape)
    return {"one": _ms(one, device), "all": _ms(split, device)}


def _loss(rank: int, count: int, dtype: torch.dtype, tokens: int, width: int, vocabulary: int) -> tuple[Step, Step]:
    x, weight, target, part, where = _head(rank, count, dtype, tokens, width, vocabulary)

    def step(weight: Tensor, options: dict[str, Any]) -> None:
        loss = fused_linear_cross_entropy(x, weight, target, **options)
        torch.autograd.grad(loss, (x, weight))

    return lambda: step(weight, {}), lambda: step(part, where)


def _log_probs(rank: int, count: int, dtype: torch.dtype, tokens: int, width: int, vocabulary: int) -> tuple[Step, Step]:
    x, weight, target, part, where = _head(rank, count, dtype, tokens, width, vocabulary)
    seen = torch.randn(tokens)

    def step(weight: Tensor, options: dict[str, Any]) -> None:
        torch.autograd.grad(linear_log_probs(x, weight, target, **options), (x, weight), seen)

    return lambda: step(weight, {}), lambda: step(part, where)


def _head(rank: int, count: int, dtype: torch.dtype, tokens: int, width: int, vocabulary: int) -> Any:
    """x, the weight, targets, this rank's rows of the weight and the options that say which they are."""
    torch.manual_seed(0)
    x = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    weight = (torch.randn(vocabulary, width, dtype=dtype) * (2 / width**0.5)).requires_grad_()
    target = torch.randint(0, vocabulary, (tokens,))
    first, stop = rank * vocabulary // count, (rank + 1) * vocabulary // count
    where = {"process_group": dist.group.WORLD, "vocab_range": (first, stop), "vocab_size": vocabulary}
    return x, weight, target, weight.detach()[first:stop].clone().requires_grad_(), where


def _embedding(rank: int, count: int, dtype: torch.dtype, tokens: int, width: int, vocabulary: int) -> tuple[Step, Step]:
    torch.manual_seed(0)
    module = VocabParallelEmbedding(vocabulary, width, equal_counts=tokens % count == 0, dtype=dtype)
    table = torch.randn(vocabulary, width, dtype=dtype, requires_grad=True)
    indices, seen = torch.randint(0, vocabulary, (tokens,)), torch.randn(tokens, width, dtype=dtype)
    own, seen_of_own = indices.chunk(count)[rank], seen.chunk(count)[rank]
    return (
        lambda: torch.autograd.grad(embedding(indices, table), table, seen),
        lambda: torch.autograd.grad(module(own), module.weight, seen_of_own),
    )


def _ms(step: Step, device: torch.device) -> float:
    """Wall time of a call, the host's work in it; calls follow each other without a wait."""
    for _ in range(_WARM_UP):
        step()
    wanted = max(2, min(100, int(_SAMPLE_SECONDS / max(1e-4, _timed(step, 1, device)))))
    # As many calls as the rank that wants fewest: ranks wait for each other in each.
    calls = int(_over_ranks(wanted, dist.ReduceOp.MIN, device))
    median = statistics.median(_timed(step, calls, device) for _ in range(_SAMPLES))
    return 1e3 * _over_ranks(median, dist.ReduceOp.MAX, device)


def _over_ranks(number: float, operation: Any, device: torch.device) -> float:
    found = torch.tensor([number], dtype=torch.float64, device=device)
    dist.all_reduce(found, operation)
    return found.item()


def _timed(step: Step, calls: int, device: torch.device) -> float:
    wait(device)
    start = time.perf_counter()
    for _ in range(calls):
        step()
    wait(device)
    return (time.perf_counter() - start) / calls
