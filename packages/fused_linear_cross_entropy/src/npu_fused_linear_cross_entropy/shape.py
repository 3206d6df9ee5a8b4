"""Sizes, dtypes, options and the device, which decide how a loss is computed."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch
from npu_tiling import Device
from npu_tiling.pytorch.tensors import statistics_dtype

from .calls import Needs
from .options import Options


class Task(Enum):
    """Results of one call of an operator."""

    LOSS = "the outputs alone"
    LOSS_AND_GRADIENTS = "the outputs, and the gradients of a loss that is one number"
    GRADIENTS = "gradients, given those of the losses and entropies"
    DISTRIBUTIONS = "moments and log-probabilities of each token's distribution"
    DISTRIBUTION_GRADIENTS = "gradients, given those of moments and log-probabilities"


class Shape(NamedTuple):
    """All that the decision how a loss is computed depends on.

    Attributes:
        task: the results.
        tokens, width, vocabulary: N, H and the rows of the weight.
        x_dtype, weight_dtype: of x, and of the weight as it was given.
        bias_dtype: None where there is no bias.
        options: of the loss.
        needs: which gradients are computed.
        unfinished: whether factors of the gradients are left for later (see `reference.rows.target_facts`).
        writes_fp32: whether matrix products of x's dtype can be fp32.
        frozen_width: of the columns of x, those of a weight that is not trained; the others are an adapter's.
        is_readable: whether a kernel's own matrix product can read x and the weight (see launch/product.py).
        device: whose kernels run; None for plain PyTorch.
    """

    task: Task
    tokens: int
    width: int
    vocabulary: int
    x_dtype: torch.dtype
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    options: Options
    needs: Needs
    unfinished: bool
    writes_fp32: bool
    is_readable: bool
    device: Device | None
    frozen_width: int = 0

    @property
    def is_of_distributions(self) -> bool:
        """Whether there are no losses."""
        return self.task in (Task.DISTRIBUTIONS, Task.DISTRIBUTION_GRADIENTS)

    @property
    def is_row_factor_times_exponentials(self) -> bool:
        """Whether the gradient of the logits is a factor of the row times exponentials, in a dtype with fp32's range."""
        options = self.options
        other = (
            self.is_of_distributions
            or self.frozen_width
            or options.softcap is not None
            or options.return_entropy
            or options.smoothed
            or options.argmax
        )
        return not other and not self.needs.dbias and self.x_dtype != torch.float16

    @property
    def logits_dtype(self) -> torch.dtype:
        """The dtype that PyTorch's product of x and the weight is rounded to."""
        return statistics_dtype(self.x_dtype) if self.writes_fp32 else self.x_dtype
