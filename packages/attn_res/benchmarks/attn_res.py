"""npu_attn_res.attn_res beside its peers: `npu-bench attn_res`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import npu_attn_res
import torch
from npu_bench import Benchmark, Case, Sweep, UnavailableError
from torch import Tensor

EPS = 1e-6
DTYPE = torch.bfloat16
STATISTIC_BYTES = 4
STACKED_DIMENSIONS = 3  # blocks, tokens, width
Forward = Callable[..., Tensor]


# Blocks are one stacked tensor or, listed, N tensors of their own, which a provider that needs them stacked has to stack.
def case(tokens: int, n_blocks: int, width: int, x: float | str | None = None, *, listed: bool = False) -> Case:
    name = f"T{tokens}_N{n_blocks}_D{width}" + ("_list" if listed else "")
    return Case(name, {"tokens": tokens, "blocks": n_blocks, "width": width, "listed": listed}, x)


SHAPES = ((1024, 8, 4096), (8192, 8, 4096), (8192, 16, 7168))
CASES = (*(case(*shape) for shape in SHAPES), *(case(*shape, listed=True) for shape in SHAPES))
SWEEPS = {
    "tokens": Sweep("tokens", "tokens, 8 blocks, hidden size 4096", [case(2**i, 8, 4096, 2**i) for i in range(6, 16)]),
    "blocks": Sweep(
        "blocks", "blocks, 2048 tokens, hidden size 4096", [case(2048, n, 4096, n) for n in (2**i for i in range(8))]
    ),
    "hidden": Sweep(
        "hidden", "hidden size, 4096 tokens, 8 blocks", [case(4096, 8, d, d) for d in (2**i for i in range(7, 15))]
    ),
    "model": Sweep(
        "model",
        "hidden size of a model, 4096 tokens, 8 blocks",
        [
            case(4096, 8, width, model)
            for model, width in {
                "Qwen2.5-0.5B": 896,
                "Llama-3.2-1B": 2048,
                "Kimi-Linear-48B": 2304,
                "Llama-3.1-8B": 4096,
                "DeepSeek-V3": 7168,
                "Llama-3.1-405B": 16384,
            }.items()
        ],
    ),
}


def inputs(case: Case, device: torch.device) -> Mapping[str, Tensor]:
    tokens, n_blocks, width = case["tokens"], case["blocks"], case["width"]
    if case["listed"]:
        shape = (tokens, width)
        tensors = {f"block_{i}": torch.randn(shape, dtype=DTYPE, device=device) for i in range(n_blocks)}
    else:
        tensors = {"blocks": torch.randn(n_blocks, tokens, width, dtype=DTYPE, device=device)}
    tensors["query"] = (torch.randn(width, device=device) / width**0.5).to(DTYPE)
    tensors["rms_weight"] = (1 + 0.1 * torch.randn(width, device=device)).to(DTYPE)
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}


def stacked(blocks: Sequence[Tensor]) -> Tensor:
    return blocks[0] if blocks[0].dim() == STACKED_DIMENSIONS else torch.stack(tuple(blocks))


def reference(*tensors: Tensor) -> Tensor:
    *blocks, query, rms_weight = tensors
    v = stacked(blocks)
    keys = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + EPS) * rms_weight
    alpha = torch.softmax((keys * query).sum(-1), 0)
    return (alpha.unsqueeze(-1) * v).sum(0)


def formula(*tensors: Tensor) -> Tensor:
    """The plain formula, fp32 inside."""
    return reference(*(tensor.float() for tensor in tensors)).to(tensors[0].dtype)


def ours(case: Case, device: torch.device) -> Forward:
    def forward(*tensors: Tensor) -> Tensor:
        *blocks, query, rms_weight = tensors
        return npu_attn_res.attn_res(blocks if case["listed"] else blocks[0], query, rms_weight, rms_eps=EPS)

    return forward


def eager_formula(case: Case, device: torch.device) -> Forward:
    return formula


def compiled_formula(case: Case, device: torch.device) -> Forward:
    import torch._functorch.config as functorch

    torch._dynamo.reset()  # every case is compiled for its own shape; none counts against the limit of recompilations
    functorch.donated_buffer = False  # buffers given away by the first backward would forbid to retain the graph
    return torch.compile(formula, dynamic=False)


def liger(case: Case, device: torch.device) -> Forward:
    if device.type == "cpu":
        raise UnavailableError("liger-kernel has no kernels for a CPU")
    try:
        from liger_kernel.ops import LigerAttnResFunction  # type: ignore[import-not-found]
    except ImportError as error:
        raise UnavailableError(str(error)) from None
    return lambda *tensors: LigerAttnResFunction.apply(stacked(tensors[:-2]), *tensors[-2:], EPS)


def fla(case: Case, device: torch.device) -> Forward:
    if device.type == "cpu":
        raise UnavailableError("fla has no kernels for a CPU")
    try:
        from fla.ops.attnres import fused_attnres  # type: ignore[import-not-found]
    except ImportError as error:
        raise UnavailableError(str(error)) from None

    def forward(*tensors: Tensor) -> Tensor:
        *blocks, query, rms_weight = tensors
        return fused_attnres(query, blocks if case["listed"] else blocks[0].unbind(), rms_weight, rms_eps=EPS)

    return forward


def traffic(case: Case, mode: str) -> int:
    """Forward: v read, h written. Backward: v and dh read, dv written. Parameters and statistics once each."""
    tokens, n_blocks, width = case["tokens"], case["blocks"], case["width"]
    row, parameters = tokens * width * DTYPE.itemsize, 2 * width * DTYPE.itemsize
    statistics = (2 * n_blocks + 1) * tokens * STATISTIC_BYTES
    if mode == "backward":
        return (2 * n_blocks + 1) * row + 2 * parameters + statistics
    return (n_blocks + 1) * row + parameters + (statistics if mode == "forward" else 0)


BENCHMARK = Benchmark(
    name="attn_res",
    distribution="npu-attn-res",
    cases=CASES,
    inputs=inputs,
    providers={
        "ours": ours,
        "torch": eager_formula,
        "compile": compiled_formula,
        "liger": liger,
        "fla": fla,
    },
    reference=reference,
    traffic=traffic,
    sweeps=SWEEPS,
    peers=("liger-kernel", "fla-core"),
    host_cases=(case(16, 8, 256), *(case(16, n, 256, listed=True) for n in (8, 16))),
)
