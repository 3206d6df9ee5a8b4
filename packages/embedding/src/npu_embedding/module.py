"""The embedding as modules: a drop-in for torch.nn.Embedding, and a table that is split over the ranks of a group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from npu_tiling.pytorch import arguments
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


class VocabParallelEmbedding(nn.Module):
    """A table whose rows are split over the ranks of a process group.

    Each rank holds the rows from `vocab_start_index` to before `vocab_end_index` as the parameter `weight` and looks up in
    them; the sum over the ranks is the result. All ranks are called with the same indices and get the same result. Its
    gradient must be the same on all ranks too, as it is where what follows is replicated, or is tensor parallel and reduces
    the gradient of its own input; the backward then needs no communication.

    Args:
        num_embeddings: rows of the whole table; they need not divide evenly.
        embedding_dim: D.
        padding_idx: see `embedding`; counted in the whole table.
        scale_grad_by_freq: see `embedding`.
        process_group: the ranks; None for the default group.
        device, dtype: of the weight.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        scale_grad_by_freq: bool = False,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        arguments.whole("num_embeddings", num_embeddings, least=0)
        arguments.whole("embedding_dim", embedding_dim, least=0)
        arguments.flags(scale_grad_by_freq=scale_grad_by_freq)
        if arguments.whole("padding_idx", padding_idx, or_none=True) is not None:
            assert padding_idx is not None
            if not -num_embeddings <= padding_idx < num_embeddings:
                limits = f"from {-num_embeddings} to {num_embeddings - 1}"
                raise ValueError(f"padding_idx is {padding_idx} and must be {limits}.")
            padding_idx %= num_embeddings
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx
        self.scale_grad_by_freq = scale_grad_by_freq
        self.process_group = process_group
        rank, ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.vocab_start_index = rank * num_embeddings // ranks
        self.vocab_end_index = (rank + 1) * num_embeddings // ranks
        self.weight = nn.Parameter(
            torch.empty((self.vocab_end_index - self.vocab_start_index, embedding_dim), device=device, dtype=dtype)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weight from a normal distribution, as torch.nn.Embedding does; the padding row is zero."""
        nn.init.normal_(self.weight)
        if self.padding_idx is not None and self.vocab_start_index <= self.padding_idx < self.vocab_end_index:
            with torch.no_grad():
                self.weight[self.padding_idx - self.vocab_start_index].zero_()

    def load_table(self, table: Tensor) -> None:
        """Copies this rank's rows of a whole table [num_embeddings, embedding_dim]."""
        arguments.tensor("table", table)
        arguments.shape("table", table, (self.num_embeddings, self.embedding_dim))
        with torch.no_grad():
            self.weight.copy_(table[self.vocab_start_index : self.vocab_end_index])

    def forward(self, indices: Tensor) -> Tensor:
        """Rows [..., embedding_dim] for indices [...], the same on every rank."""
        rows = embedding(
            indices,
            self.weight,
            self.padding_idx,
            scale_grad_by_freq=self.scale_grad_by_freq,
            vocab_range=(self.vocab_start_index, self.vocab_end_index),
            num_embeddings=self.num_embeddings,
        )
        return _SumOverRanks.apply(rows, self.process_group)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        rows = f"rows {self.vocab_start_index} to {self.vocab_end_index - 1}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, {rows}"


class _SumOverRanks(torch.autograd.Function):
    """The sum over the ranks, in place; its gradient is that of the result, which is the same on every rank."""

    @staticmethod
    def forward(ctx, rows, process_group):  # type: ignore[no-untyped-def]
        ctx.mark_dirty(rows)
        dist.all_reduce(rows, group=process_group)
        return rows

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        return dy, None
