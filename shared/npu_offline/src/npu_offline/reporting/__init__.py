"""One page of what is known of packages' kernels without a chip."""

from .collect import collect
from .page import render

__all__ = ["collect", "render"]
