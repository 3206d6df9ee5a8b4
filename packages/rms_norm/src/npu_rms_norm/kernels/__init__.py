"""Device code of RMSNorm: imports Triton, and no PyTorch."""

from . import backward, backward_wide, chunks, forward, shared

__all__ = ["backward", "backward_wide", "chunks", "forward", "shared"]
