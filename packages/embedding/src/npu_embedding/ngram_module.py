"""The n-gram embedding as a module, with the tables, the numbers and the state_dict of Qwen4-Exp's."""

from __future__ import annotations

from math import isqrt
from typing import Any

import torch
from npu_tiling.pytorch import arguments
from torch import Tensor, nn

from . import checks
from .ngram import ngram_embedding

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15  # of splitmix64
_SEED_OF_A_LAYER = 10007


class NGramEmbedding(nn.Module):
    """Rows that n-grams of tokens name by a hash, concatenated: `ngram_embedding` with its tables and numbers.

    Parameters and buffers have the names, shapes and values of transformers' `Qwen4ExpTextNGramEmbedding`, so that its
    state_dict loads: `ngram_embedding.weight`, `layer_multipliers`, `ngram_heads_vocab_sizes` and `ngram_heads_offsets`.

    Args:
        vocab_size: ids of tokens; multipliers are so small that no product with an id overflows 63 bits.
        embedding_dim: of the result, a multiple of the number of heads.
        eos: see `ngram_embedding`.
        ngram_size: tokens of the longest n-gram.
        heads_per_ngram: heads of each length of n-gram.
        table_size: the heads' tables have as many rows as the primes from here on, one prime for each head of all layers.
        layer_index: which of the layers with n-grams this is.
        seed: of the multipliers.
        divisible_by: rows of the padded table are a multiple.
        sparse: see `ngram_embedding`.
        device, dtype: of the table.

    Raises:
        TypeError: an argument has a type that is not supported.
        ValueError: a number is out of range.
    """

    layer_multipliers: Tensor
    ngram_heads_vocab_sizes: Tensor
    ngram_heads_offsets: Tensor

    def __init__(
        self,
        vocab_size: int,
        embedding_dim: int,
        eos: int,
        *,
        ngram_size: int = 3,
        heads_per_ngram: int = 8,
        table_size: int = 20_000_000,
        layer_index: int = 0,
        seed: int = 1234,
        divisible_by: int = 128,
        sparse: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        vocab_size = arguments.whole("vocab_size", vocab_size, least=0)
        embedding_dim = arguments.whole("embedding_dim", embedding_dim, least=0)
        eos = checks.signed("eos", eos, 32)
        ngram_size = arguments.whole("ngram_size", ngram_size, least=2)
        heads_per_ngram = arguments.whole("heads_per_ngram", heads_per_ngram, least=1)
        table_size = arguments.whole("table_size", table_size, least=2)
        layer_index = arguments.whole("layer_index", layer_index, least=0)
        seed = arguments.whole("seed", seed)
        divisible_by = arguments.whole("divisible_by", divisible_by, least=1)
        arguments.flags(sparse=sparse)
        heads = (ngram_size - 1) * heads_per_ngram
        if embedding_dim % heads:
            raise ValueError(f"embedding_dim is {embedding_dim} and must be a multiple of {heads}, the number of heads.")
        self.eos, self.ngram_size, self.sparse = eos, ngram_size, sparse
        sizes = primes(table_size, layer_index * heads, heads)
        rows = -(-sum(sizes) // divisible_by) * divisible_by
        offsets = [sum(sizes[:head]) for head in range(heads)]
        made = (multipliers(vocab_size, ngram_size, layer_index, seed), sizes, offsets)
        for name, numbers in zip(("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"), made, strict=True):
            self.register_buffer(name, torch.tensor(numbers, dtype=torch.int64, device=device))
        self.ngram_embedding = nn.Embedding(rows, embedding_dim // heads, sparse=sparse, device=device, dtype=dtype)

    def forward(self, ids: Tensor, history: Tensor | None = None) -> Tensor:
        """[..., T, embedding_dim] for ids [..., T], after the ids `history` [..., ngram_size - 1]."""
        return ngram_rows_of(self, ids, history, self.eos, self.sparse)


def ngram_rows_of(module: Any, ids: Tensor, history: Tensor | None, eos: int, sparse: bool) -> Tensor:
    """`ngram_embedding` of a module that has the tables and numbers of `NGramEmbedding`."""
    numbers = (module.layer_multipliers, module.ngram_heads_vocab_sizes, module.ngram_heads_offsets)
    table = module.ngram_embedding.weight
    return ngram_embedding(ids, table, *numbers, eos, module.ngram_size, history, sparse=sparse)


def multipliers(vocab_size: int, count: int, layer_index: int, seed: int) -> list[int]:
    """Odd numbers drawn by splitmix64, so small that no product with an id reaches 2^63."""
    bound = max(1, (2**63 - 1) // max(vocab_size, 1) // 2)
    first = seed + _SEED_OF_A_LAYER * layer_index
    return [2 * (_splitmix64(first + _GAMMA * (index + 1)) % bound) + 1 for index in range(count)]


def _splitmix64(state: int) -> int:
    """The number that follows a state. Source: Steele et al., "Fast splittable pseudorandom number generators"."""
    mixed = (state + _GAMMA) & _MASK
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & _MASK
    return mixed ^ (mixed >> 31)


def primes(first: int, skipped: int, count: int) -> list[int]:
    """`count` primes from `first` on, after the first `skipped` of them."""
    found: list[int] = []
    number = first
    while len(found) < skipped + count:
        if number == 2 or (number % 2 and all(number % divisor for divisor in range(3, isqrt(number) + 1, 2))):
            found.append(number)
        number += 1
    return found[skipped:]
