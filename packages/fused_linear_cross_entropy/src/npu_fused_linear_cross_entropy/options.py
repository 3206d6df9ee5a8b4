"""The options of the loss, as every layer below the public functions is given them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

REDUCTIONS = ("mean", "sum", "none")

#: What an option is where a public function does not offer it.
DEFAULTS = {
    "ignore_index": -100,
    "reduction": "mean",
    "label_smoothing": 0.0,
    "lse_square_scale": 0.0,
    "softcap": None,
    "logit_scale": 1.0,
    "token_scaling": False,
    "return_z_loss": False,
    "return_token_accuracy": False,
    "return_predicted_tokens": False,
    "return_lse": False,
    "return_entropy": False,
    "accum_dtype": None,
    "chunk_tokens": None,
    "memory_budget": None,
}

# Schema types of the fields, by their annotations.
_SCHEMA_TYPES = {
    "int": "int",
    "str": "str",
    "float": "float",
    "bool": "bool",
    "float | None": "float?",
    "int | None": "int?",
    "torch.dtype | None": "ScalarType?",
}


@dataclass(frozen=True)
class Options:
    """See `fused_linear_cross_entropy`; `group`, `vocab_first` and `vocab_size` say what part of a vocabulary this is.

    Attributes:
        group: name of the process group that holds the other parts, "" where there are none.
        vocab_first: the column of the vocabulary that the first row of the weight is.
        vocab_size: columns of the whole vocabulary.
    """

    ignore_index: int
    reduction: str
    label_smoothing: float
    lse_square_scale: float
    softcap: float | None
    logit_scale: float
    token_scaling: bool
    return_z_loss: bool
    return_token_accuracy: bool
    return_predicted_tokens: bool
    return_lse: bool
    return_entropy: bool
    accum_dtype: torch.dtype | None
    chunk_tokens: int | None
    memory_budget: int | None
    group: str
    vocab_first: int
    vocab_size: int

    @property
    def argmax(self) -> bool:
        """Whether the place of each row's maximum is wanted."""
        return self.return_token_accuracy or self.return_predicted_tokens

    @property
    def smoothed(self) -> bool:
        return self.label_smoothing != 0.0

    @property
    def shift_invariant(self) -> bool:
        """Whether gradients of the one loss depend on differences of raw logits alone."""
        one = self.reduction != "none" and not self.return_entropy
        return one and self.softcap is None and self.logit_scale == 1.0

    @property
    def arguments(self) -> tuple[object, ...]:
        """As the registered operators take them."""
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))


SCHEMA = ", ".join(f"{_SCHEMA_TYPES[str(field.type)]} {field.name}" for field in dataclasses.fields(Options))
