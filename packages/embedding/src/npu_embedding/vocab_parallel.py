"""A table that is split over the ranks of a group."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from npu_tiling import arguments
from npu_tiling.dispatch import group_named
from npu_tiling.dtensor import is_distributed
from torch import Tensor, nn

from . import split
from .api import embedding
from .call import check_table, padding_row


class VocabParallelEmbedding(nn.Module):
    """A table whose rows are split over the ranks of a process group.

    Each rank holds the rows from `vocab_start_index` to before `vocab_end_index` as the parameter `weight`. A rank is
    called with indices of its own, as many as it likes, which are sent to the ranks that hold their rows; rows come back.
    The gradient of `weight` is the sum over the indices of all ranks, in fp32, rounded once. All ranks call the forward,
    and all or none the backward. The host waits once a forward, for the numbers of indices. With the same indices on all
    ranks a gradient counts once for each rank: give each its part, or take DTensors.

    Args:
        num_embeddings: rows of the whole table; they need not divide evenly.
        embedding_dim: D.
        padding_idx: see `embedding`; counted in the whole table.
        scale_grad_by_freq: see `embedding`; how many indices name a row is counted over all ranks.
        sparse: see `embedding`: the gradient has an entry for each index that names a row of this rank.
        equal_counts: every rank has equally many indices in each call, as where batches have one shape. Then all ranks look
            up the indices of all: the host does not wait, and a CUDA graph can capture a step. Gradients may differ in
            their last bits. Nothing checks it: ranks that break it wait for ever or get wrong rows. Indices go to the
            owners of their rows all the same where `sparse` is True, and where a rank would send others more than 32 MiB of
            rows.
        process_group: the ranks; None for the default group.
        device, dtype: of the weight.

    Source: row-wise sharding of TorchRec, Ivchenko et al., RecSys 2022.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        equal_counts: bool = False,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        arguments.whole("num_embeddings", num_embeddings, least=0)
        arguments.whole("embedding_dim", embedding_dim, least=0)
        arguments.flags(scale_grad_by_freq=scale_grad_by_freq, sparse=sparse, equal_counts=equal_counts)
        if padding_idx is not None:
            padding_idx = padding_row(padding_idx, num_embeddings)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx
        self.scale_grad_by_freq = scale_grad_by_freq
        self.sparse = sparse
        self.equal_counts = equal_counts
        self._group = None if process_group is None else process_group.group_name  # it can be copied and pickled
        rank, ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
        self._rank, self._bounds = rank, tuple(r * num_embeddings // ranks for r in range(ranks + 1))
        self.vocab_start_index, self.vocab_end_index = self._bounds[rank : rank + 2]
        self.weight = nn.Parameter(
            torch.empty((self.vocab_end_index - self.vocab_start_index, embedding_dim), device=device, dtype=dtype)
        )
        self.reset_parameters()

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks; None for the default group."""
        return None if self._group is None else group_named(self._group)

    def reset_parameters(self) -> None:
        """Draws the weight from a normal distribution, that of torch.nn.Embedding; the padding row is zero.

        Ranks draw rows of their own, also where their default generators have the same state, which they keep.
        """
        generator, seed = None, torch.randint(2**62, (), device=self.weight.device)
        if type(seed) is Tensor and not seed.is_meta:  # neither fake nor without data
            generator = torch.Generator(seed.device).manual_seed(int(seed) + self._rank)
        nn.init.normal_(self.weight, generator=generator)
        if self.padding_idx is not None and self.vocab_start_index <= self.padding_idx < self.vocab_end_index:
            with torch.no_grad():
                self.weight[self.padding_idx - self.vocab_start_index].zero_()

    def load_table(self, table: Tensor) -> None:
        """Copies this rank's rows of a whole table [num_embeddings, embedding_dim]."""
        arguments.shape("table", table, (self.num_embeddings, self.embedding_dim))
        with torch.no_grad():
            self.weight.copy_(table[self.vocab_start_index : self.vocab_end_index])

    def forward(self, indices: Tensor) -> Tensor:
        """Rows [..., embedding_dim] for this rank's indices [...], int32 or int64, the same dtype on all ranks.

        With `equal_counts` the ranks have equally many.
        """
        check_table(indices, self.weight, None, None)
        if is_distributed((indices, self.weight)):
            raise TypeError("indices and weight must be plain tensors: `embedding` takes DTensors.")
        rows, group = (self.vocab_start_index, self.vocab_end_index), self._group
        ranks = len(self._bounds) - 1
        if self.equal_counts and not self.sparse and split.sends_little(indices, self.weight, ranks):
            padding = padding_row(self.padding_idx, self.num_embeddings)
            scales = self.scale_grad_by_freq
            return split.by_all(indices, self.weight, rows, self.num_embeddings, group, ranks, padding, scales)
        run = partial(
            embedding,
            weight=self.weight,
            padding_idx=self.padding_idx,
            scale_grad_by_freq=self.scale_grad_by_freq,
            sparse=self.sparse,
            vocab_range=rows,
            num_embeddings=self.num_embeddings,
        )
        return split.by_counts(run, indices, self._bounds, group)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        rows = f"rows {self.vocab_start_index} to {self.vocab_end_index - 1}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, {rows}"
