"""The embedding as modules: drop-ins for torch.nn.Embedding and torch.nn.EmbeddingBag."""

from __future__ import annotations

import functools
from typing import Any

import torch
from npu_tiling.pytorch.patching import stands_for
from torch import Tensor, nn

from .api import embedding
from .bags import check_mode, embedding_bag

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def other_dtype(table: Any) -> str | None:
    """Why `embedding` does not look up rows of a table with this dtype, None if it does."""
    dtype = table.weight.dtype  # while torch.fx traces it is none
    is_other = isinstance(dtype, torch.dtype) and dtype not in _DTYPES
    return f"its weight is {dtype}, which embedding does not take" if is_other else None


class Embedding(nn.Embedding):
    """torch.nn.Embedding, with `npu_embedding.embedding` for its forward and its gradient.

    Arguments, attributes, `from_pretrained`, initial values and state_dict are those of torch.nn.Embedding. The forward of
    that class runs, with a warning, where ours cannot stand for it: its weight was quantised, that forward was replaced, a
    TorchFunctionMode would see other calls. It also runs while the module is traced or exported to ONNX.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Rows [..., embedding_dim] for indices [...]."""
        if not stands_for(self, nn.Embedding, other_dtype(self), input=input, weight=self.weight):
            return nn.Embedding.forward(self, input)
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
