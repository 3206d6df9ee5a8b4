"""Mode "graph": forward and backward recorded once, and replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from .checks import Expected, Verdict, judge
from .declaration import Forward
from .devices import Device
from .modes import as_tuple, differentiated, matching


def capture(
    device: Device,
    forward: Forward,
    inputs: Mapping[str, Tensor],
    seeds: Sequence[Tensor],
    expected: Expected,
    tolerance: float,
) -> tuple[Callable[[], None], Verdict]:
    """Record a provider's forward and backward, and compare what a replay writes with the reference.

    Recorded while the inputs hold other values, their own in reverse order, and replayed into results full of NaN: a
    number that was recorded, or a result that is not written again, is found.

    Args:
        device: where.
        forward, inputs, seeds, expected, tolerance: as for `checks.verify`.

    Returns:
        The replay, and whether it is right.

    Raises:
        As `Device.capture`.
    """
    wanted = differentiated(inputs)

    def both() -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        outputs = as_tuple(forward(*inputs.values()))
        found = torch.autograd.grad(outputs, tuple(wanted.values()), matching(seeds, outputs), allow_unused=True)
        return tuple(output.detach() for output in outputs), found

    passed = (*inputs.values(), *seeds)
    own = [tensor.detach().clone() for tensor in passed]
    try:
        _write(passed, [tensor.flip(tuple(range(tensor.dim()))) for tensor in own])
        replay, (outputs, gradients) = device.capture(both)
        for result in (*outputs, *gradients):
            if result is not None and result.is_floating_point():
                result.fill_(torch.nan)
    finally:
        _write(passed, own)
    replay()
    device.synchronize()
    pairs: list[tuple[str, Tensor | None, Tensor]] = [
        (f"output {i} of a replay", output, right)
        for i, (output, right) in enumerate(zip(outputs, expected.outputs, strict=True))
    ]
    by_name = dict(zip(wanted, gradients, strict=True))
    pairs += [(f"gradient of {name} of a replay", by_name[name], right) for name, right in expected.gradients.items()]
    return replay, judge(pairs, tolerance, expected.error)


def _write(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.detach().copy_(value)
