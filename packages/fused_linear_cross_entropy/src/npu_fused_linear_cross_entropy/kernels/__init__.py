"""Device code of the cross entropy: imports Triton, and no PyTorch."""

from . import chunk, keep, losses, one_sweep, scale, targets

__all__ = ["chunk", "keep", "losses", "one_sweep", "scale", "targets"]
