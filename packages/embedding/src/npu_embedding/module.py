"""The embedding as modules: drop-ins for torch.nn.Embedding and torch.nn.EmbeddingBag."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from .api import embedding
from .bags import check_mode, embedding_bag


class Embedding(nn.Embedding):
    """torch.nn.Embedding, with `npu_embedding.embedding` for its forward and its gradient.

    Arguments, attributes, `from_pretrained`, initial values and state_dict are those of torch.nn.Embedding.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Rows [..., embedding_dim] for indices [...]."""
        return embedding(
            input,
            self.weight,
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )


class EmbeddingBag(nn.EmbeddingBag):
    """torch.nn.EmbeddingBag, with `npu_embedding.embedding_bag` for its forward and its gradient.

    Arguments, attributes, `from_pretrained`, initial values and state_dict are those of torch.nn.EmbeddingBag.

    Raises:
        NotImplementedError: mode is "max".
        ValueError: mode is not "sum", "mean" or "concat"; torch has no "concat".
    """

    @functools.wraps(nn.EmbeddingBag.__init__)  # type: ignore[misc]  # whose signature it has
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_mode(self.mode)

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Sums or means [B, embedding_dim] of rows for indices [B, K], or [n] with offsets [B]."""
        return embedding_bag(
            input,
            self.weight,
            offsets,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.mode,
            self.sparse,
            per_sample_weights,
            self.include_last_offset and offsets is not None,
            self.padding_idx,
        )
