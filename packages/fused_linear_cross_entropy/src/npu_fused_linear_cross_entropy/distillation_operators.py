"""The registered operators of distillation: `distillation`, and `distillation_backward`, which computes the logits again."""

from __future__ import annotations

from typing import Any

from npu_tiling.pytorch.tensors import statistics_dtype, without_autocast
from torch import Tensor

from . import parallel
from .calls import DistillationInputs, Needs, split
from .compute import begin, is_unfinished
from .gradients import Gradients
from .loss_operator import LossOperator
from .options import DistillationOptions
from .registration import Gradient, fake_gradients
from .shape import Task
from .ways.distillation import Distillation


@without_autocast
def _forward(*arguments: Any) -> tuple[Tensor | None, ...]:
    """The loss and its two parts, three gradients and the factors that these lack."""
    inputs, options, needed = split(arguments, DistillationInputs, DistillationOptions)
    task = Task.LOSS_AND_GRADIENTS if any(needed) else Task.LOSS
    run = begin(Distillation, task, inputs, options, Needs(*needed))
    losses, gradients = run.losses_and_gradients(None) if any(needed) else (run.losses(), Gradients(None, None, None, None))

    def reduced(values: Tensor) -> Tensor:
        values = run.facts.masked(values)
        if options.reduction == "none":
            return values.view(parallel.whole_shape(inputs.x, options))
        return values.sum() / run.facts.divisor

    loss = options.soft_weight * losses[0]
    if options.hard_weight:
        loss = loss + options.hard_weight * losses[1]
    soft = reduced(losses[0]) if options.return_parts else None
    hard = reduced(losses[1]) if options.return_parts and options.hard_weight else None
    return reduced(loss), soft, hard, *gradients.of(inputs.x), gradients.unfinished


@without_autocast
def _backward(dloss: Tensor, *arguments: Any) -> tuple[Tensor | None, ...]:
    """Three gradients, given those of the tokens' losses, or of the one loss: everything is computed again."""
    inputs, options, needed = split(arguments, DistillationInputs, DistillationOptions)
    run = begin(Distillation, Task.GRADIENTS, inputs, options, Needs(*needed))
    return run.losses_and_gradients(dloss.reshape(-1))[1].of(inputs.x)


def _fake(*arguments: Any) -> tuple[Tensor | None, ...]:
    inputs, options, needs = split(arguments, DistillationInputs, DistillationOptions)
    x, dtype = inputs.x, statistics_dtype(inputs.x.dtype)
    size = parallel.whole_shape(x, options) if options.reduction == "none" else ()
    wanted = (True, options.return_parts, options.return_parts and options.hard_weight != 0.0)
    losses = (x.new_empty(size, dtype=dtype) if asked else None for asked in wanted)
    unfinished = any(needs) and is_unfinished(inputs, options)
    return *losses, *fake_gradients(inputs, needs), x.new_empty(3, dtype=dtype) if unfinished else None


distillation = LossOperator(
    "distillation",
    DistillationInputs,
    DistillationOptions,
    ("loss", "soft", "hard"),
    _forward,
    _fake,
    Gradient("distillation_backward", "Tensor dloss", DistillationInputs, DistillationOptions, _backward),
    upstream=(0,),
)
