"""Linear layer and cross entropy in one, for training on Huawei Ascend NPUs, CUDA and CPUs."""

from .api import fused_linear_cross_entropy
from .causal_lm import causal_lm_loss
from .distillation import DistillationLoss, Teacher, linear_distillation_loss
from .explain import explain
from .log_prob_outputs import LogProbs
from .log_probs import linear_log_probs
from .module import FusedLinearCrossEntropyLoss
from .patching import patch
from .rows import LinearCrossEntropyOutput

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
