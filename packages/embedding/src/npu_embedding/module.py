"""The embedding as a module: a drop-in for torch.nn.Embedding."""

from __future__ import annotations

from torch import Tensor, nn

from .api import embedding


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
