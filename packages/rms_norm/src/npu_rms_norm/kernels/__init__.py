"""Device code of RMSNorm: imports Triton, and no PyTorch."""

from . import backward, backward_chunks, backward_wide, forward, forward_chunks, forward_wide, shared

__all__ = ["backward", "backward_chunks", "backward_wide", "forward", "forward_chunks", "forward_wide", "shared"]
