"""Device code of RMSNorm: imports Triton, and no PyTorch."""

from . import backward, forward

__all__ = ["backward", "forward"]
