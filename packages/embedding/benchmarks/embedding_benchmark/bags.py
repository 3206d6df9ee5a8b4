"""Bags, scaled and normalised rows, and rows of int8, beside torch's: `npu-bench <this file>`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import npu_embedding
import torch
from npu_bench import Benchmark, Case
from torch import Tensor
from torch.nn.functional import embedding, embedding_bag, rms_norm

EPS = 1e-6
INDEX_BYTES = 8
SCALE_BYTES = 4
fp32, bf16 = torch.float32, torch.bfloat16

SPREADS = ("even", "zipf", "long", "empty")  # ids over bags: equally many, by 1 / rank, 18 % in one, none in 9 of 10

# Parameters of a case: what is computed, bags and ids a bag, and a table [rows, width].


def case(kind: str, bags: int, ids: int, width: int, rows: int, dtype: torch.dtype) -> Case:
    name = f"{kind}_{bags}x{ids}_V{rows}_D{width}_{str(dtype).removeprefix('torch.')}"
    return Case(name, {"kind": kind, "bags": bags, "ids": ids, "width": width, "rows": rows, "dtype": dtype})


CASES = (
    case("sum", 8192, 8, 256, 32000, bf16),
    case("sum", 65536, 32, 128, 1000000, fp32),
    case("sum", 4096, 4, 4096, 128256, bf16),
    case("mean", 16384, 20, 64, 1000000, fp32),  # bags of 1 to 39 ids, between offsets
    case("even", 4096, 5, 1024, 100000, bf16),  # means between offsets too
    case("zipf", 4096, 5, 1024, 100000, bf16),
    case("long", 4096, 5, 1024, 100000, bf16),
    case("empty", 4096, 5, 1024, 100000, bf16),
    case("weighted", 8192, 16, 256, 100000, fp32),
    case("scaled", 32768, 1, 4096, 128256, bf16),
    case("normalised", 32768, 1, 4096, 128256, bf16),
    case("normalised", 8192, 1, 2560, 32000, bf16),
    case("dequantised", 32768, 1, 4096, 128256, torch.int8),
)


def inputs(case: Case, device: torch.device) -> Mapping[str, Tensor]:
    """Indices and the table; then offsets, weights of positions, a scale for each row, or one number for all."""
    kind, bags, ids, rows = (case[name] for name in ("kind", "bags", "ids", "rows"))
    tensors = {"indices": torch.randint(0, rows, (bags, ids) if ids > 1 else (bags,), device=device)}
    weight = torch.randn(rows, case["width"], device=device)
    if kind == "dequantised":
        tensors["weight"] = (30 * weight).clamp(-127, 127).to(case["dtype"])
        tensors["row_scales"] = torch.rand(rows, device=device).to(bf16)
        return tensors
    tensors["weight"] = weight.to(case["dtype"]).requires_grad_()
    if kind == "mean":
        lengths = torch.randint(1, 2 * ids, (bags,), device=device)
        tensors["offsets"] = lengths.cumsum(0) - lengths
        tensors["indices"] = torch.randint(0, rows, (int(lengths.sum()),), device=device)
    elif kind in SPREADS:
        lengths = lengths_of(kind, bags, bags * ids, device)
        tensors["offsets"] = lengths.cumsum(0) - lengths
        tensors["indices"] = tensors["indices"].view(-1)
    elif kind == "weighted":
        tensors["per_sample_weights"] = torch.randn(bags, ids, device=device).requires_grad_()
    elif kind == "scaled":
        tensors["multiplier"] = torch.tensor(case["width"] ** 0.5)
    return tensors


def lengths_of(kind: str, bags: int, n: int, device: torch.device) -> Tensor:
    """How many of n ids each bag has."""
    places = torch.arange(bags, device=device)
    if kind == "even":
        return torch.full_like(places, n // bags)
    share = torch.ones(bags, device=device)
    if kind == "zipf":
        share = 1 / (1.0 + torch.randperm(bags, device=device))
    elif kind == "long":
        share[bags // 2] = 0.22 * bags  # of 1.22 in all
    elif kind == "empty":
        share = (places % 10 == 0).float()
    return torch.multinomial(share, n, replacement=True).bincount(minlength=bags)


def reference(indices: Tensor, weight: Tensor, option: Tensor | None = None) -> Tensor:
    """The definition, told apart by the option's shape: none, one number, a number a row, weights of positions, offsets."""
    if option is None:
        rows = weight[indices]
        return rows.sum(1) if indices.dim() > 1 else normalised(rows)
    if not option.is_floating_point():
        return embedding_bag(indices, weight, option, mode="mean")
    if option.dim() == 0:
        return weight[indices] * option
    if option.dim() == 1:
        return weight[indices].to(option.dtype) * option[indices].unsqueeze(-1)
    return (weight[indices] * option.unsqueeze(-1)).sum(1)


def normalised(rows: Tensor) -> Tensor:
    return rms_norm(rows, rows.shape[-1:], eps=EPS)


def ours(case: Case, device: torch.device) -> Callable[..., Tensor]:
    kind, factor = case["kind"], case["width"] ** 0.5
    if kind == "scaled":
        return lambda indices, weight, _: npu_embedding.embedding(indices, weight, multiplier=factor)
    if kind == "normalised":
        return lambda indices, weight: npu_embedding.embedding(indices, weight, rms_norm_eps=EPS)
    if kind == "dequantised":
        return lambda indices, weight, scales: npu_embedding.embedding(indices, weight, row_scales=scales)
    return lambda *tensors: bags_of(npu_embedding.embedding_bag, case, *tensors)


def pytorch(case: Case, device: torch.device) -> Callable[..., Tensor]:
    kind, factor = case["kind"], case["width"] ** 0.5
    if kind == "scaled":
        return lambda indices, weight, _: embedding(indices, weight) * factor
    if kind == "normalised":
        return lambda indices, weight: normalised(embedding(indices, weight))
    if kind == "dequantised":
        return lambda indices, weight, scales: weight[indices].to(scales.dtype) * scales[indices].unsqueeze(-1)
    return lambda *tensors: bags_of(embedding_bag, case, *tensors)


def bags_of(
    function: Callable[..., Tensor], case: Case, indices: Tensor, weight: Tensor, option: Tensor | None = None
) -> Tensor:
    if case["kind"] in ("mean", *SPREADS):
        return function(indices, weight, option, mode="mean")
    return function(indices, weight, mode="sum", per_sample_weights=option)


def traffic(case: Case, mode: str) -> int:
    """Forward: a row for each id is read, one for each bag written. Backward: a row for each bag is read, the table written.

    The backward of weights of positions and of a normalisation reads the rows again.
    """
    kind, n = case["kind"], case["bags"] * case["ids"]
    row = case["width"] * case["dtype"].itemsize
    result = case["width"] * (bf16.itemsize if kind == "dequantised" else case["dtype"].itemsize)
    indices = n * INDEX_BYTES + (case["bags"] * INDEX_BYTES if kind in ("mean", *SPREADS) else 0)
    if mode != "backward":
        scales = n * (SCALE_BYTES if kind == "weighted" else bf16.itemsize if kind == "dequantised" else 0)
        return n * row + case["bags"] * result + indices + scales
    again = n * (row + 2 * SCALE_BYTES) if kind == "weighted" else n * row if kind == "normalised" else 0
    return case["bags"] * result + case["rows"] * row + indices + again


BENCHMARK = Benchmark(
    name="embedding_bag",
    distribution="npu-embedding",
    cases=CASES,
    inputs=inputs,
    providers={"ours": ours, "torch": pytorch},
    reference=reference,
    traffic=traffic,
)
