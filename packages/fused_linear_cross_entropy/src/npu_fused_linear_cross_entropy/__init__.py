"""Linear layer and cross entropy in one, for training on Huawei Ascend NPUs, CUDA and CPUs."""

from .api import FusedLinearCrossEntropyLoss, causal_lm_loss, fused_linear_cross_entropy
from .call import DistillationLoss, LinearCrossEntropyOutput, LogProbs
from .checks import Teacher
from .distillation import linear_distillation_loss
from .explain import explain
from .log_probs import linear_log_probs
from .patching import patch

__all__ = [
    "DistillationLoss",
    "FusedLinearCrossEntropyLoss",
    "LinearCrossEntropyOutput",
    "LogProbs",
    "Teacher",
    "causal_lm_loss",
    "explain",
    "fused_linear_cross_entropy",
    "linear_distillation_loss",
    "linear_log_probs",
    "patch",
]
