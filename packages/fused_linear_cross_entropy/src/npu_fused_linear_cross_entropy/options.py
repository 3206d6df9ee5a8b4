"""The options of the loss, as every layer below the public functions is given them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.distributed import ProcessGroup

REDUCTIONS = ("mean", "sum", "none")
DIVERGENCES = ("forward_kl", "reverse_kl", "jensen_shannon", "total_variation")


#: Types of options.
Option = str | float | bool | torch.dtype | ProcessGroup | tuple[int, int] | None


class Options(NamedTuple):
    """See `fused_linear_cross_entropy`; `group`, `vocab_first` and `vocab_size` say which part of it the weight is.

    A tuple, in the order of the registered operators' arguments: its hash, by which launches are remembered, costs little.

    Attributes:
        group: name of the process group that holds the other parts, "" where there are none.
        vocab_first: the column of the vocabulary that the first row of the weight is.
        vocab_size: columns of the whole vocabulary.
    """

    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0
    lse_square_scale: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    token_scaling: bool = False
    return_z_loss: bool = False
    return_token_accuracy: bool = False
    return_predicted_tokens: bool = False
    return_lse: bool = False
    return_entropy: bool = False
    accum_dtype: torch.dtype | None = None
    chunk_tokens: int | None = None
    memory_budget: int | None = None
    sequence_parallel: bool = False
    group: str = ""
    vocab_first: int = 0
    vocab_size: int = 0

    @property
    def of_head(self) -> Options:
        """Those that every loss of a linear layer has."""
        return self

    @property
    def is_one_number(self) -> bool:
        """Whether the forward can compute the gradients: those of one number are known but for a factor."""
        return self.reduction != "none" and not self.return_entropy

    @property
    def differentiable(self) -> tuple[int, ...]:
        """Places of the outputs that have gradients: the loss, and entropies."""
        return (0, 5) if self.return_entropy else (0,)

    @property
    def extras(self) -> tuple[bool, ...]:
        """Which optional outputs are wanted, in their order."""
        wanted = self.return_z_loss, self.return_token_accuracy, self.return_predicted_tokens
        return (*wanted, self.return_lse, self.return_entropy)

    @property
    def argmax(self) -> bool:
        """Whether the place of each row's maximum is wanted."""
        return self.return_token_accuracy or self.return_predicted_tokens

    @property
    def smoothed(self) -> bool:
        return self.label_smoothing != 0.0

    @property
    def shift_invariant(self) -> bool:
        """Whether gradients follow from logits minus a number of their row, given the row's coefficients."""
        return self.is_one_number and self.softcap is None and self.logit_scale == 1.0


#: The options that a caller names; the other fields follow from the process group and the weight.
NAMES = tuple(name for name in Options._fields if name not in ("group", "vocab_first", "vocab_size"))


class DistillationOptions(NamedTuple):
    """See `linear_distillation_loss`; in the order of the registered operators' arguments."""

    divergence: str = "forward_kl"
    beta: float = 0.5
    temperature: float = 1.0
    soft_weight: float = 1.0
    hard_weight: float = 0.0
    ignore_index: int = -100
    reduction: str = "mean"
    softcap: float | None = None
    logit_scale: float = 1.0
    teacher_softcap: float | None = None
    teacher_logit_scale: float = 1.0
    return_parts: bool = False
    accum_dtype: torch.dtype | None = None
    chunk_tokens: int | None = None
    memory_budget: int | None = None
    sequence_parallel: bool = False
    group: str = ""
    vocab_first: int = 0
    vocab_size: int = 0

    @property
    def is_one_number(self) -> bool:
        """Whether the forward can compute the gradients: those of one number are known but for a factor."""
        return self.reduction != "none"

    @property
    def differentiable(self) -> tuple[int, ...]:
        """Places of the outputs that have gradients: the loss."""
        return (0,)

    @property
    def of_head(self) -> Options:
        """Those that every loss of a linear layer has."""
        return Options(**{name: value for name, value in self._asdict().items() if name in Options._fields})


EachOptions = Options | DistillationOptions
