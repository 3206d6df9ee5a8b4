"""Device code of the cross entropy: imports Triton, and no PyTorch."""

from . import chunk, keep, losses, targets

__all__ = ["chunk", "keep", "losses", "targets"]
