"""Device code of the embedding: imports Triton, and no PyTorch."""

from . import backward, cuda, forward, sort

__all__ = ["backward", "cuda", "forward", "sort"]
