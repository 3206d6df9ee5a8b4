"""The operators registered with PyTorch, in its namespace `npu_rms_norm`."""

from . import gated, plain, quantised
from .library import OPERATORS

__all__ = ["OPERATORS", "gated", "plain", "quantised"]
