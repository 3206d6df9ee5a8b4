"""The registered operators of the cross entropy: `forward`, and `backward`, which computes the logits again."""

from __future__ import annotations

from typing import Any

import torch
from npu_tiling.pytorch.tensors import statistics_dtype
from torch import Tensor

from .calls import LossInputs, split
from .compute import backward, count_saved, forward, is_unfinished
from .loss_operator import LossOperator
from .options import Options
from .registration import Gradient, fake_gradients
from .rows import LinearCrossEntropyOutput


def _fake_forward(*arguments: Any) -> tuple[Tensor | None, ...]:
    inputs, options, (save_statistics, *needed) = split(arguments, LossInputs, Options)
    x, target, dtype = inputs.x, inputs.target, statistics_dtype(inputs.x.dtype)
    reduced = target.shape if options.reduction == "none" else ()
    wanted: list[tuple[bool, Any, torch.dtype]] = [
        (True, reduced, dtype),
        (options.return_z_loss, reduced, dtype),
        (options.return_token_accuracy, (), dtype),
        (options.return_predicted_tokens, target.shape, torch.int64),
        (options.return_lse, target.shape, dtype),
        (options.return_entropy, target.shape, dtype),
        (save_statistics, (count_saved(options), target.numel()), dtype),
    ]
    outputs = [x.new_empty(shape, dtype=dtype) if asked else None for asked, shape, dtype in wanted]
    unfinished = any(needed) and is_unfinished(inputs, options)
    return *outputs, *fake_gradients(inputs, needed), x.new_empty(3, dtype=dtype) if unfinished else None


linear_cross_entropy = LossOperator(
    "forward",
    LossInputs,
    Options,
    LinearCrossEntropyOutput._fields,
    forward,
    _fake_forward,
    Gradient("backward", "Tensor? dloss, Tensor? dentropy, Tensor statistics", LossInputs, Options, backward),
    upstream=(LinearCrossEntropyOutput._fields.index("loss"), LinearCrossEntropyOutput._fields.index("entropy")),
    saved="statistics",
)
