"""Checks of the arguments of `linear_distillation_loss`."""

from __future__ import annotations

from typing import Any, NamedTuple

from npu_tiling.pytorch import arguments
from npu_tiling.pytorch.sharding import is_distributed
from torch import Tensor

from . import parallel
from .calls import DistillationInputs
from .checks import check_head, check_target
from .compute import check_columns_early
from .options import DistillationOptions


class Teacher(NamedTuple):
    """A teacher's head: logits t = logit_scale (x weight^T + bias), or softcap tanh(t / softcap). It gets no gradients.

    Attributes:
        x: [..., H'], with the leading dimensions of the student's x; H' may differ from H.
        weight: [V, H'], x's dtype or fp32.
        bias: [V], x's dtype or fp32.
        softcap, logit_scale: as the student's.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    logit_scale: float = 1.0


def checked_teacher(teacher: Any, teacher_probs: Any, teacher_top_k: Any) -> Teacher | None:
    """The teacher's head; None where probabilities are given."""
    if [teacher, teacher_probs, teacher_top_k].count(None) != 2:
        raise ValueError("teacher, teacher_probs and teacher_top_k: one of them must be given, and no other.")
    if teacher_top_k is not None:
        arguments.pair("teacher_top_k", teacher_top_k, "(ids, log_probs)")
    if teacher is None:
        arguments.tensor("teacher_probs", teacher_probs, or_none=True)
        return None
    if not isinstance(teacher, tuple) or not 2 <= len(teacher) <= len(Teacher._fields):
        raise TypeError(f"teacher is a {type(teacher).__name__} and must be a Teacher, or a tuple (x, weight, bias).")
    made = Teacher(*teacher)
    for name in ("x", "weight"):
        arguments.tensor(f"teacher.{name}", getattr(made, name))
    arguments.tensor("teacher.bias", made.bias, or_none=True)
    return made


def check_inputs(inputs: DistillationInputs, options: DistillationOptions) -> None:
    """Types, dtypes, shapes and devices, and targets on a CPU."""
    x, weight, target, bias, teacher_x, teacher_weight, teacher_bias, teacher_probs, _, frozen, _ = inputs
    if is_distributed(tuple(inputs)):
        raise TypeError("x, weight and the teacher's tensors must be plain tensors, not DTensors: gather the weights first.")
    check_head(x, weight, bias, frozen)
    if teacher_x is not None and teacher_weight is not None:
        arguments.rows("teacher.x", teacher_x)
        arguments.shape("teacher.x", teacher_x, (*x.shape[:-1], teacher_x.shape[-1]))
        arguments.parameter(
            "teacher.weight", teacher_weight, ((weight.shape[0], teacher_x.shape[-1]),), teacher_x, "teacher.x's"
        )
        arguments.parameter("teacher.bias", teacher_bias, (weight.shape[:1],), teacher_x, "teacher.x's", or_none=True)
        arguments.device("teacher.x", teacher_x, x, "x's")
    if teacher_probs is not None:
        arguments.shape("teacher_probs", teacher_probs, (*parallel.whole_shape(x, options), weight.shape[0]))
        arguments.device("teacher_probs", teacher_probs, x, "x's")
        if not teacher_probs.is_floating_point():
            raise TypeError(f"teacher_probs is {teacher_probs.dtype} and must be floating point.")
    check_hard_weight(target, options)
    if target is None:
        return
    check_target(target, x, options)
    if options.hard_weight:
        check_columns_early("target", target, options)


def check_hard_weight(target: Tensor | None, options: DistillationOptions) -> None:
    """Raises ValueError where the cross entropy has a weight, and there are no targets."""
    if target is None and options.hard_weight:
        raise ValueError(f"target is None and must be given where hard_weight is not 0: it is {options.hard_weight}.")
