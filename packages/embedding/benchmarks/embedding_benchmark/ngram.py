"""The n-gram look-up beside the hash and the look-up in PyTorch's operators: `npu-bench <this file>`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import npu_embedding
import torch
from npu_bench import Benchmark, Case
from torch import Tensor
from torch.nn.functional import embedding

EOS = 2
INDEX_BYTES = 8
NGRAM_SIZE = 3
VOCABULARY = 131072

# Parameters of a case: tokens, heads of 2-grams and of 3-grams, and the table: rows of a head and their width.


def case(tokens: int, heads: int, rows: int, width: int) -> Case:
    name = f"{tokens}x{heads}_V{rows}_D{width}_bf16"
    return Case(name, {"tokens": tokens, "heads": heads, "rows": rows, "width": width})


CASES = (case(8192, 16, 31013, 160), case(4096, 8, 200003, 256), case(64, 16, 31013, 160))


def inputs(case: Case, device: torch.device) -> Mapping[str, Tensor]:
    heads, rows = case["heads"], case["rows"]
    table = torch.randn(heads * rows, case["width"], dtype=torch.bfloat16, device=device)
    return {
        "ids": torch.randint(0, VOCABULARY, (case["tokens"],), device=device),
        "table": table.requires_grad_(),
        "multipliers": torch.randint(-(2**63), 2**63 - 1, (NGRAM_SIZE,), device=device),
        "sizes": torch.arange(rows, rows - 2 * heads, -2, device=device),
        "offsets": torch.arange(heads, device=device) * rows,
    }


def reference(ids: Tensor, table: Tensor, multipliers: Tensor, sizes: Tensor, offsets: Tensor) -> Tensor:
    """The hash and the look-up as Hugging Face's models compute them, in PyTorch's operators."""
    before = torch.nn.functional.pad(ids, (NGRAM_SIZE - 1, 0), value=EOS)
    mixed, ended, hashes = ids * multipliers[0], torch.zeros_like(ids, dtype=torch.bool), []
    for k in range(1, NGRAM_SIZE):
        token = before[NGRAM_SIZE - 1 - k : len(before) - k]
        ended = ended | (token == EOS)
        mixed = mixed ^ torch.where(ended, EOS, token) * multipliers[k]
        hashes.append(mixed.unsqueeze(-1).expand(-1, len(sizes) // (NGRAM_SIZE - 1)))
    rows = torch.remainder(torch.cat(hashes, -1), sizes) + offsets
    return embedding(rows, table).flatten(1)


def ours(case: Case, device: torch.device) -> Callable[..., Tensor]:
    return lambda *tensors: npu_embedding.ngram_embedding(*tensors, EOS, NGRAM_SIZE)


def pytorch(case: Case, device: torch.device) -> Callable[..., Tensor]:
    return reference


def traffic(case: Case, mode: str) -> int:
    """Forward: a row for each token and head is read and written. Backward: it is read, the table written. Ids once."""
    row, n = case["width"] * torch.bfloat16.itemsize, case["tokens"] * case["heads"]
    written = case["heads"] * case["rows"] if mode == "backward" else n
    return (n + written) * row + case["tokens"] * INDEX_BYTES


BENCHMARK = Benchmark(
    name="ngram_embedding",
    distribution="npu-embedding",
    cases=CASES,
    inputs=inputs,
    providers={"ours": ours, "torch": pytorch},
    reference=reference,
    traffic=traffic,
)
