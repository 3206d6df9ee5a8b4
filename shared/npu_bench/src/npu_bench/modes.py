"""The calls that are timed and checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .declaration import Forward, Outputs


def as_tuple(outputs: Outputs) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def differentiated(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}


def matching(gradients: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The gradients in the outputs' dtypes: the very tensors where these are theirs."""
    return tuple(gradient.to(output.dtype) for gradient, output in zip(gradients, outputs, strict=True))


def timed_call(
    mode: str,
    forward: Forward,
    inputs: Mapping[str, Tensor],
    gradients: Sequence[Tensor],
) -> Callable[[], Any]:
    """What one repetition does. Everything that is not the mode's own work is done here, once.

    Args:
        mode: of `MODES`, without "graph", which is `graphs.capture`'s. "backward" differentiates a graph that is built
            here and retained; the call for "no-grad-forward" must be made with gradients disabled.
        forward: the provider's.
        inputs: its arguments.
        gradients: of the outputs, allocated beforehand.
    """
    tensors = tuple(inputs.values())
    if mode in ("forward", "no-grad-forward"):
        return lambda: forward(*tensors)
    wanted = tuple(differentiated(inputs).values())
    outputs = as_tuple(forward(*tensors))
    seeds = matching(gradients, outputs)
    if mode == "backward":
        return lambda: torch.autograd.grad(outputs, wanted, seeds, retain_graph=True, allow_unused=True)
    return lambda: torch.autograd.grad(as_tuple(forward(*tensors)), wanted, seeds, allow_unused=True)
