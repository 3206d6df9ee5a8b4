"""What kernels compute for a loss, as steps of a plan; reference.py has the same names for plain PyTorch."""

# ruff: noqa: F401  # ways.py takes these from here

from __future__ import annotations

from npu_tiling.plans import Plan

from ..call import Options
from . import Chunk
from .gradients import add_target_rows, scale_rows
from .one_sweep import end_exponentials, exponentials
from .product import ExponentialProduct
from .rows import coefficients, join, losses, target_facts
from .two_sweeps import gradient, statistics, statistics_and_gradient


def prepare(p: Plan, chunk: Chunk, options: Options) -> None:
    """Nothing: kernels read raw products."""
