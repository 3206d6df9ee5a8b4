"""Device code of RMSNorm: imports Triton, and no PyTorch."""

from . import backward, backward_wide, chunks, forward

__all__ = ["backward", "backward_wide", "chunks", "forward"]
