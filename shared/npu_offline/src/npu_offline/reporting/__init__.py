"""The report: one page with the results of all analyses of packages' kernels."""

from .collect import collect
from .page import render

__all__ = ["collect", "render"]
