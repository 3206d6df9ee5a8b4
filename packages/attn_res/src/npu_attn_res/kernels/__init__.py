"""Device code of AttnRes: imports Triton, and no PyTorch."""

from . import backward, cuda, forward, forward_prefetch, merge, split_d, table

__all__ = ["backward", "cuda", "forward", "forward_prefetch", "merge", "split_d", "table"]
