"""npu_attn_res.attn_res_keys beside its formula: `npu-bench tools/bench_keys.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import npu_attn_res
import torch
from npu_bench import Benchmark, Case
from torch import Tensor

EPS = 1e-6
BANK, PREFIX = torch.bfloat16, torch.float32  # h and the queries are fp32, too
Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


def case(tokens: int, n_blocks: int, width: int, queries: int) -> Case:
    sizes = {"tokens": tokens, "blocks": n_blocks, "width": width, "queries": queries}
    return Case(f"T{tokens}_N{n_blocks}_D{width}_Q{queries}", sizes)


CASES = (case(8192, 8, 2048, 1), case(8192, 8, 4608, 1), case(8192, 8, 4608, 3), case(8192, 8, 4096, 4), case(64, 4, 256, 3))


def inputs(case: Case, device: torch.device) -> Mapping[str, Tensor]:
    tokens, n_blocks, width, queries = (case[each] for each in ("tokens", "blocks", "width", "queries"))
    tensors = {
        "bank": torch.randn(tokens, n_blocks, width, dtype=BANK, device=device),
        "prefix": torch.randn(tokens, width, dtype=PREFIX, device=device),
        "query": torch.randn(queries, width, dtype=PREFIX, device=device),
    }
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}


def formula(bank: Tensor, prefix: Tensor, query: Tensor) -> Tensor:
    """h [queries, tokens, width]."""
    v = torch.cat([bank.to(prefix.dtype), prefix.unsqueeze(-2)], -2)
    n = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + EPS)
    alpha = torch.softmax(torch.einsum("qd,tnd->qtn", query * v.shape[-1] ** -0.5, n), -1)
    return torch.einsum("qtn,tnd->qtd", alpha, n)


def ours(case: Case, device: torch.device) -> Forward:
    scale = case["width"] ** -0.5
    return lambda *tensors: npu_attn_res.attn_res_keys(*tensors, EPS, scale)


def eager_formula(case: Case, device: torch.device) -> Forward:
    return formula


def compiled_formula(case: Case, device: torch.device) -> Forward:
    import torch._functorch.config as functorch

    torch._dynamo.reset()  # every case is compiled for its own shape; none counts against the limit of recompilations
    functorch.donated_buffer = False  # buffers given away by the first backward would forbid to retain the graph
    return torch.compile(formula, dynamic=False)


def traffic(case: Case, mode: str) -> int:
    """Forward: sources read, h written. Backward: sources and dh read, gradients written. Queries, statistics once each."""
    tokens, n_blocks, width, queries = (case[each] for each in ("tokens", "blocks", "width", "queries"))
    sources, rows = tokens * width * (n_blocks * BANK.itemsize + PREFIX.itemsize), tokens * width * queries * PREFIX.itemsize
    parameters = queries * width * PREFIX.itemsize
    statistics = 2 * tokens * queries * (n_blocks + 1) * PREFIX.itemsize
    if mode == "backward":
        return 2 * sources + rows + 2 * parameters + statistics
    return sources + rows + parameters + (statistics if mode == "forward" else 0)


BENCHMARK = Benchmark(
    name="attn_res_keys",
    distribution="npu-attn-res",
    cases=CASES,
    inputs=inputs,
    providers={"ours": ours, "torch": eager_formula, "compile": compiled_formula},
    reference=formula,
    traffic=traffic,
)
