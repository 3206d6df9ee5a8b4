"""The arguments of the registered operators, in their order: a record of tensors, the options (options.py), and flags.

Every record has the tensors of a linear layer:

    x            [N, H]; an operator's caller may give [..., H], and a target [...]
    weight       [V, H]
    bias         [V]
    frozen       [V, H'], a weight of the first columns of x, without a gradient; `weight` is then [V, H - H'], of the others
    weight_grad  [V, H], to which the weight's gradient is added
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

from torch import Tensor

_Inputs = TypeVar("_Inputs", bound=tuple[Any, ...])
_Options = TypeVar("_Options", bound=tuple[Any, ...])


class LossInputs(NamedTuple):
    """The tensors of a loss.

    Attributes:
        target: [N].
        class_weight: [V].
        divisor: replaces the number of counted rows, by which "mean" divides: a number, or [N], one for each row.
    """

    x: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None = None
    class_weight: Tensor | None = None
    divisor: Tensor | None = None
    frozen: Tensor | None = None
    weight_grad: Tensor | None = None


class DistributionInputs(NamedTuple):
    """The tensors of `distributions`.

    Attributes:
        ids: int64 [N, K], columns of the whole vocabulary; others stand for none.
        rates: [N], 1 / temperature.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    ids: Tensor | None
    rates: Tensor | None
    frozen: Tensor | None
    weight_grad: Tensor | None


class ProbabilityInputs(NamedTuple):
    """The tensors of a loss with probabilities as targets.

    Attributes:
        class_weight: [V].
        probs: [N, V], of this rank's columns.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    class_weight: Tensor | None
    probs: Tensor
    frozen: Tensor | None
    weight_grad: Tensor | None


class DistillationInputs(NamedTuple):
    """The tensors of a distillation.

    Attributes:
        target: [N].
        teacher_x: [N, H'].
        teacher_weight: [V, H'].
        teacher_bias: [V].
        teacher_probs: [N, V], in place of the last three.
        token_weight: [N], factors of the losses.
    """

    x: Tensor
    weight: Tensor
    target: Tensor | None
    bias: Tensor | None
    teacher_x: Tensor | None
    teacher_weight: Tensor | None
    teacher_bias: Tensor | None
    teacher_probs: Tensor | None
    token_weight: Tensor | None
    frozen: Tensor | None
    weight_grad: Tensor | None


EachInputs = LossInputs | DistributionInputs | ProbabilityInputs | DistillationInputs


class Needs(NamedTuple):
    """Which gradients are computed."""

    dx: bool
    dweight: bool
    dbias: bool


def split(
    arguments: tuple[Any, ...], inputs: type[_Inputs], options: type[_Options]
) -> tuple[_Inputs, _Options, tuple[Any, ...]]:
    """The arguments of a registered operator as a record of tensors, a record of options, and flags."""
    first = len(inputs._fields)  # type: ignore[attr-defined]
    end = first + len(options._fields)  # type: ignore[attr-defined]
    return inputs(*arguments[:first]), options(*arguments[first:end]), arguments[end:]
