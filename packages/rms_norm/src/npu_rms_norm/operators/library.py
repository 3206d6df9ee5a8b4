"""The package's operators in PyTorch."""

from __future__ import annotations

from npu_tiling.pytorch.autograd import OperatorLibrary

OPERATORS = OperatorLibrary("npu_rms_norm")
