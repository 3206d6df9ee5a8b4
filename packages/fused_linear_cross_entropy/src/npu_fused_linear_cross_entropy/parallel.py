"""A vocabulary that is split over processes: ranks exchange numbers per token, and never whole rows of logits.

Every rank has the same tokens and some rows of the weight. Each computes the statistics of its own logits; they exchange
maxima, sums and the target's logit, and each rank then computes its own columns of the exact gradient.
Source: Shoeybi et al., "Megatron-LM", arXiv 1909.08053.
"""

from __future__ import annotations

from npu_tiling.pytorch import collectives
from torch import Tensor

from .options import EachOptions


def most_columns(options: EachOptions, own: int) -> int:
    """Columns of the vocabulary that a rank has in equal parts: the same number on all, so that they cut tokens alike."""
    return -(-options.vocab_size // collectives.ranks(options.group)) if options.group else own


def whole_shape(x: Tensor, options: EachOptions) -> tuple[int, ...]:
    """The shape [...] of all tokens, of which x [..., H] has this rank's, or all."""
    first, *others = x.shape[:-1] or (1,)
    return x.shape[:-1] if not options.sequence_parallel else (first * collectives.ranks(options.group), *others)


def whole_rows(x: Tensor, options: EachOptions) -> Tensor:
    """x [N, H] of all ranks."""
    return collectives.gather(x, options.group).flatten(0, 1) if options.sequence_parallel else x


def summed_dx(dx: Tensor, options: EachOptions) -> Tensor:
    """The gradient of x, summed over the ranks; with `sequence_parallel` this rank's rows of it."""
    if options.sequence_parallel:
        return collectives.sum_of_own(dx.unflatten(0, (collectives.ranks(options.group), -1)), options.group)
    if options.group:
        collectives.sum_(dx, options.group)
    return dx
