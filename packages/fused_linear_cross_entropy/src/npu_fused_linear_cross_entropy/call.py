"""The records of the operators: the arguments and the results of each direction, and the options that they share. And
what the public functions return.

From a record npu_tiling/calls.py derives the operator's schema, its fake function and the key of its plans. All records have
the tensors of a linear layer:

    x            [..., H]
    weight       [V, H]
    bias         [V]
    frozen       [V, H'], a weight of the first columns of x, without a gradient; `weight` is then [V, H - H'], of the others
    weight_grad  [V, H], to which the weight's gradient is added

and, where they have gradients as results, `Needs`. A result that is not asked for is None.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from npu_tiling import collectives
from npu_tiling.calls import Empty, derive, statistics_dtype
from npu_tiling.dispatch import exported
from torch import Tensor
from torch.distributed import ProcessGroup

FP32, INT32, INT64 = torch.float32, torch.int32, torch.int64  # for modules of kernels, which import no PyTorch
REDUCTIONS = ("mean", "sum", "none")
DIVERGENCES = ("forward_kl", "reverse_kl", "jensen_shannon", "total_variation")

# Rows of the statistics [7, tokens] of a loss: the largest z, the sum of exp(z - largest), the z of the target, the sum of
# w (z - largest) with w the columns' weights or 1, the sum of exp(z - largest) (z - largest), the column of the first
# largest z, and the sum of w. Where exponentials take the place of logits, k of formula.py takes that of the largest z.
MAXIMUM, SUM, TARGET, TOTAL, DOT, PLACE, WEIGHT = range(7)
STATISTICS = 7
SAVED, SAVED_ENTROPY = 3, 5  # the first rows, which a backward needs: without and with an entropy
# Rows of the coefficients [5, tokens]: k, that of the statistics, and factors of the gradient, see formula.py.
K, A, B, C, Q = range(5)
COEFFICIENTS = 5
# These stand for a column: the target is outside the vocabulary, or ignored.
NO_COLUMN, IGNORED = -1, -2

#: Types of options.
Option = str | float | bool | torch.dtype | ProcessGroup | tuple[int, int] | None
Results = dict[str, Empty | None]


class Options(NamedTuple):
    """See `fused_linear_cross_entropy`; `group`, `vocab_first` and `vocab_size` say which part of it the weight is.

    Attributes:
        group: name of the process group that holds the other parts, "" where there are none.
        vocab_first: the column of the vocabulary that the first row of the weight is.
        vocab_size: columns of the whole vocabulary.
        vocab_parts: equal parts of the whole vocabulary, of which each rank has as many. Above 1 each has a product and
            statistics of its own, which are joined in order: what comes out does not depend on the number of ranks.
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
    vocab_parts: int = 1

    @property
    def of_head(self) -> Options:
        """As `DistillationOptions.of_head`: these are all."""
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
NAMES = tuple(name for name in Options._fields if name not in ("group", "vocab_first", "vocab_size", "vocab_parts"))


class DistillationOptions(NamedTuple):
    """See `linear_distillation_loss`."""

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
        """The options that all losses have, from which decide.py decides."""
        return Options(**{name: getattr(self, name) for name in Options._fields if hasattr(self, name)})


EachOptions = Options | DistillationOptions


class Needs(NamedTuple):
    """Which gradients are computed."""

    dx: bool
    dweight: bool
    dbias: bool


NOTHING = Needs(False, False, False)


class Forward(NamedTuple):
    """A loss, and its gradients where it is one number: those lack the upstream gradient, and the factors `unfinished`.

    Attributes:
        target: [...].
        class_weight: [V].
        divisor: replaces the number of counted rows, by which "mean" divides: a number, or [...], one for each row.
        save_statistics: whether the statistics that `Backward` takes are a result.
    """

    x: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    class_weight: Tensor | None
    divisor: Tensor | None
    frozen: Tensor | None
    weight_grad: Tensor | None
    options: Options
    save_statistics: bool = False
    needs: Needs = NOTHING

    def results(self) -> Results:
        options, dtype, each = self.options, statistics_dtype(self.x.dtype), self.target.shape
        reduced = Empty(each if options.reduction == "none" else (), dtype)
        saved = SAVED_ENTROPY if options.return_entropy else SAVED
        return {
            "loss": reduced,
            "z_loss": reduced if options.return_z_loss else None,
            "token_accuracy": Empty((), dtype) if options.return_token_accuracy else None,
            "predicted_tokens": Empty(each, torch.int64) if options.return_predicted_tokens else None,
            "lse": Empty(each, dtype) if options.return_lse else None,
            "entropy": Empty(each, dtype) if options.return_entropy else None,
            "statistics": Empty((saved, self.target.numel()), dtype) if self.save_statistics else None,
            **gradients(self),
            "unfinished": Empty((3,), dtype) if is_unfinished(self) else None,
        }


class Backward(NamedTuple):
    """The gradients of a loss, which computes the logits again: of x, weight and bias.

    Attributes:
        dloss, dentropy: upstream gradients, [...] or one number.
        statistics: those that `Forward` saved.
    """

    dloss: Tensor | None
    dentropy: Tensor | None
    statistics: Tensor
    x: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    class_weight: Tensor | None
    divisor: Tensor | None
    frozen: Tensor | None
    weight_grad: Tensor | None
    options: Options
    needs: Needs

    def results(self) -> Results:
        return gradients(self)


class Distributions(NamedTuple):
    """Moments and log-probabilities of the distributions of x [N, H].

    Attributes:
        ids: int64 [N, K], columns of the whole vocabulary; others stand for none.
        rates: [N], 1 / temperature.
        top_k: how many of the largest logits.
        find_first: whether the first largest logit's column is wanted.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    ids: Tensor | None
    rates: Tensor | None
    frozen: Tensor | None
    weight_grad: Tensor | None
    options: Options
    top_k: int
    find_first: bool

    def results(self) -> Results:
        (rows,) = whole_shape(self.x, self.options)
        dtype = statistics_dtype(self.x.dtype)
        tops = [Empty((rows, self.top_k), each) if self.top_k else None for each in (dtype, torch.int64)]
        moments = ("maximum", "log_sum", "entropy", "square_sum", "mean_logit")
        return {
            **dict.fromkeys(moments, Empty((rows,), dtype)),
            "ids_log_probs": None if self.ids is None else Empty(self.ids.shape, dtype),
            "top_log_probs": tops[0],
            "top_ids": tops[1],
            "first": Empty((rows,), torch.int64) if self.find_first else None,
        }


class DistributionGradients(NamedTuple):
    """The gradients of x, weight, bias and rates, given the coefficients of distributions/reference.py, [7, N].

    Attributes:
        log_probs, did_log_probs: [N, K], of the ids, and their upstream gradients; 0 where an id is no column.
    """

    coefficients: Tensor
    log_probs: Tensor | None
    did_log_probs: Tensor | None
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    ids: Tensor | None
    rates: Tensor | None
    frozen: Tensor | None
    weight_grad: Tensor | None
    options: Options
    needs: Needs
    need_drates: bool

    def results(self) -> Results:
        rates = self.rates if self.need_drates else None
        return {**gradients(self), "drates": None if rates is None else Empty(rates.shape, rates.dtype)}


class ProbabilityTargets(NamedTuple):
    """Cross entropies with probabilities as targets, and log sum exp, of x [N, H].

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
    options: Options

    def results(self) -> Results:
        each = Empty(whole_shape(self.x, self.options), statistics_dtype(self.x.dtype))
        return dict.fromkeys(("cross_entropy", "lse", "maximum", "log_sum", "sums"), each)


class ProbabilityTargetGradients(NamedTuple):
    """The gradients of x, weight and bias, given the coefficients of distributions/reference.py, [7, N].

    Attributes:
        factors: [N], which targets are multiplied by before they are subtracted from the gradient of z.
    """

    coefficients: Tensor
    factors: Tensor | None
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    class_weight: Tensor | None
    probs: Tensor
    frozen: Tensor | None
    weight_grad: Tensor | None
    options: Options
    needs: Needs

    def results(self) -> Results:
        return gradients(self)


class Distillation(NamedTuple):
    """A loss of a student and a teacher, and its gradients where it is one number, as those of `Forward`.

    Attributes:
        target: [...].
        teacher_x: [..., H'].
        teacher_weight: [V, H'].
        teacher_bias: [V].
        teacher_probs: [..., V], in place of the last three.
        token_weight: [...], factors of the losses.
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
    options: DistillationOptions
    needs: Needs = NOTHING

    def results(self) -> Results:
        options, dtype = self.options, statistics_dtype(self.x.dtype)
        reduced = Empty(whole_shape(self.x, options) if options.reduction == "none" else (), dtype)
        return {
            "loss": reduced,
            "soft": reduced if options.return_parts else None,
            "hard": reduced if options.return_parts and options.hard_weight != 0.0 else None,
            **gradients(self),
            "unfinished": Empty((3,), dtype) if is_unfinished(self) else None,
        }


class DistillationBackward(NamedTuple):
    """The gradients of a distillation, which computes the logits again: of x, weight and bias.

    Attributes:
        dloss: the upstream gradient, [...] or one number.
    """

    dloss: Tensor
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
    options: DistillationOptions
    needs: Needs

    def results(self) -> Results:
        return gradients(self)


class Scale(NamedTuple):
    """A gradient times a factor, one number."""

    gradient: Tensor
    factor: Tensor

    def results(self) -> Results:
        return {"scaled": Empty(self.gradient.shape, self.gradient.dtype)}


def replaced(record: Any, **changes: Any) -> Any:
    """A record with other values in some fields."""
    return derive(type(record), record, **changes)


def gradients(call: Any) -> Results:
    """Those of x, weight and bias."""
    weight = call.weight if call.weight_grad is None else None
    return {
        name: Empty(tensor.shape, tensor.dtype) if need and tensor is not None else None
        for name, need, tensor in zip(Needs._fields, call.needs, (call.x, weight, call.bias), strict=True)
    }


def is_unfinished(call: Any) -> bool:
    """Whether a forward leaves factors of its gradients to the backward (see `write_target_facts` in loss/reference.py)."""
    if call.x.dtype != torch.float16 or not any(call.needs):
        return False
    is_weighted = getattr(call, "class_weight", None) is not None or getattr(call, "token_weight", None) is not None
    is_small = is_weighted or isinstance(call.options, DistillationOptions)  # or large
    return call.options.reduction == "mean" or call.options.reduction == "sum" and is_small


def whole_shape(x: Any, options: EachOptions) -> tuple[Any, ...]:
    """The shape [...] of all tokens, of which x [..., H] has this rank's, or all."""
    if not options.sequence_parallel:
        return tuple(x.shape[:-1])
    first, *others = tuple(x.shape[:-1]) or (1,)
    return (first * collectives.ranks(options.group), *others)


# What the public functions return.


@exported
class LinearCrossEntropyOutput(NamedTuple):
    """A loss and the extras that were asked for; the others are None.

    Attributes:
        loss: a scalar, or [...] with the reduction "none".
        z_loss: lse_square_scale times the squares of lse, reduced as the loss is.
        token_accuracy: the share of counted rows whose first largest logit is the target's.
        predicted_tokens: int64 [...], the first largest logit of every row; -1 where ignored.
        lse: [...], the logarithm of the sum of exponentials of the logits; 0 where ignored.
        entropy: [...], of the distribution over the vocabulary; 0 where ignored.
    """

    loss: Tensor
    z_loss: Tensor | None
    token_accuracy: Tensor | None
    predicted_tokens: Tensor | None
    lse: Tensor | None
    entropy: Tensor | None


@exported
class LogProbs(NamedTuple):
    """Outputs of `linear_log_probs`; None where not asked for.

    Attributes:
        log_probs: [...], of the targets.
        entropy: [...], - sum p log p.
        ids_log_probs: [..., K], of the ids.
        top_log_probs, top_ids: [..., top_k], the largest log-probabilities in descending order, and their columns, int64.
        square_sum: [...], sum p^2.
        mean_logit: [...], sum z / V.
        is_top: bool [...], whether the target's z is the largest, and that of no column before it is as large. A softcap may
            make z of several columns equal.
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    ids_log_probs: Tensor | None = None
    top_log_probs: Tensor | None = None
    top_ids: Tensor | None = None
    square_sum: Tensor | None = None
    mean_logit: Tensor | None = None
    is_top: Tensor | None = None


@exported
class DistillationLoss(NamedTuple):
    """A loss and its parts, before their weights and reduced as it is.

    Attributes:
        loss: the weighted sum of the parts.
        soft: the divergence from the teacher.
        hard: the cross entropy with the target; None where its weight is 0.
    """

    loss: Tensor
    soft: Tensor
    hard: Tensor | None
