"""npu_attn_res.attn_res and attn_res_bank beside their peers: `npu-bench attn_res`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import npu_attn_res
import torch
from npu_bench import Benchmark, Case, Sweep, UnavailableError
from torch import Tensor

EPS = 1e-6
DTYPE = torch.bfloat16
STATISTIC_BYTES = 4
STACKED_DIMENSIONS = 3  # blocks, tokens, width
Outputs = Tensor | tuple[Tensor, Tensor]
Forward = Callable[..., Outputs]


# Blocks are one stacked tensor or, listed, N tensors of their own, which a provider that needs them stacked has to stack.
def case(tokens: int, n_blocks: int, width: int, x: float | str | None = None, *, listed: bool = False) -> Case:
    name = f"T{tokens}_N{n_blocks}_D{width}" + ("_list" if listed else "")
    return Case(name, {"tokens": tokens, "blocks": n_blocks, "width": width, "listed": listed}, x)


def bank_case(tokens: int, n_blocks: int, width: int) -> Case:
    """A layer of a decoder: a bank [tokens, blocks, width], a prefix, a layer's output, and both norms."""
    sizes = {"tokens": tokens, "blocks": n_blocks, "width": width, "listed": False, "bank": True}
    return Case(f"T{tokens}_N{n_blocks}_D{width}_bank", sizes)


def is_bank(case: Case) -> bool:
    return bool(case.parameters.get("bank", False))


SHAPES = (
    *((1024, 8, 4096), (8192, 8, 4096), (8192, 16, 7168), (4096, 4, 2048), (4096, 32, 2048)),
    *((4096, 8, 2560), (4096, 12, 5120), (4096, 8, 7168), (2048, 8, 16384)),
)
CASES = (*(case(*shape) for shape in SHAPES), *(case(*shape, listed=True) for shape in SHAPES))
CASES += (bank_case(8192, 8, 4096), bank_case(8192, 8, 7168))
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
    shape = (tokens, width)
    if is_bank(case):
        tensors = {"bank": torch.randn(tokens, n_blocks, width, dtype=DTYPE, device=device)}
        tensors |= {name: torch.randn(shape, dtype=DTYPE, device=device) for name in ("prefix", "layer_output")}
    elif case["listed"]:
        tensors = {f"block_{i}": torch.randn(shape, dtype=DTYPE, device=device) for i in range(n_blocks)}
    else:
        tensors = {"blocks": torch.randn(n_blocks, tokens, width, dtype=DTYPE, device=device)}
    tensors["query"] = (torch.randn(width, device=device) / width**0.5).to(DTYPE)
    tensors["rms_weight"] = (1 + 0.1 * torch.randn(width, device=device)).to(DTYPE)
    if is_bank(case):
        tensors["output_rms_weight"] = (1 + 0.1 * torch.randn(width, device=device)).to(DTYPE)
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}


def stacked(blocks: Sequence[Tensor]) -> Tensor:
    return blocks[0] if blocks[0].dim() == STACKED_DIMENSIONS else torch.stack(tuple(blocks))


def reference(*tensors: Tensor) -> Outputs:
    """h; of a bank RMSNorm(h) and the prefix with the layer's output."""
    if len(tensors) > STACKED_DIMENSIONS and tensors[0].dim() == STACKED_DIMENSIONS:
        bank, prefix, layer_output, query, rms_weight, output_rms_weight = tensors
        joined = prefix + layer_output
        h = mixed(torch.stack([*bank.unbind(1), joined]), query, rms_weight)
        return normalised(h) * output_rms_weight, joined
    *blocks, query, rms_weight = tensors
    return mixed(stacked(blocks), query, rms_weight)


def mixed(v: Tensor, query: Tensor, rms_weight: Tensor) -> Tensor:
    alpha = torch.softmax((normalised(v) * rms_weight * query).sum(-1), 0)
    return (alpha.unsqueeze(-1) * v).sum(0)


def normalised(v: Tensor) -> Tensor:
    return v * torch.rsqrt(v.square().mean(-1, keepdim=True) + EPS)


def formula(*tensors: Tensor) -> Outputs:
    """The plain formula, fp32 inside."""
    found = reference(*(tensor.float() for tensor in tensors))
    if isinstance(found, Tensor):
        return found.to(tensors[0].dtype)
    return found[0].to(tensors[0].dtype), found[1].to(tensors[0].dtype)


def ours(case: Case, device: torch.device) -> Forward:
    def of_bank(bank: Tensor, prefix: Tensor, layer_output: Tensor, *weights: Tensor) -> Outputs:
        found = npu_attn_res.attn_res_bank(bank, None, prefix, *weights, rms_eps=EPS, layer_output=layer_output)
        return found.normalized, found.prefix

    def forward(*tensors: Tensor) -> Tensor:
        *blocks, query, rms_weight = tensors
        return npu_attn_res.attn_res(blocks if case["listed"] else blocks[0], query, rms_weight, rms_eps=EPS)

    return of_bank if is_bank(case) else forward


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
    if is_bank(case):
        raise UnavailableError("liger-kernel takes no bank")
    try:
        from liger_kernel.ops import LigerAttnResFunction  # type: ignore[import-not-found]
    except ImportError as error:
        raise UnavailableError(str(error)) from None
    return lambda *tensors: LigerAttnResFunction.apply(stacked(tensors[:-2]), *tensors[-2:], EPS)


def fla(case: Case, device: torch.device) -> Forward:
    """Its Triton kernels, which it chooses by itself unless told otherwise."""
    if device.type == "cpu":
        raise UnavailableError("fla has no kernels for a CPU")
    for name in ("FLA_GLUON", "FLA_ATTNRES_GLUON"):
        if os.environ.get(name, "0") != "0":
            raise UnavailableError(f"{name} makes fla choose its Gluon kernels: unset it")
    try:
        from fla.ops.attnres import fused_attnres  # type: ignore[import-not-found]
    except ImportError as error:
        raise UnavailableError(str(error)) from None
    return _fla_forward(case, fused_attnres)


def fla_gluon(case: Case, device: torch.device) -> Forward:
    """Its Gluon kernels, as it calls them where FLA_GLUON or FLA_ATTNRES_GLUON is 1 and they take the call."""
    if device.type != "cuda":
        raise UnavailableError("fla's Gluon kernels are for CUDA")
    try:
        from fla.ops.attnres.backends.gluon import AttnResGluonBackend  # type: ignore[import-not-found]
    except ImportError as error:
        raise UnavailableError(str(error)) from None
    backend = AttnResGluonBackend()
    row = torch.empty(1, case["width"], dtype=DTYPE, device=device)
    taken, reason = backend.fused_attnres_verifier(row[0], [row], row[0])
    if not taken:
        raise UnavailableError(reason)
    return _fla_forward(case, backend.fused_attnres)


def _fla_forward(case: Case, fused_attnres: Callable[..., Tensor]) -> Forward:
    def of_bank(bank: Tensor, prefix: Tensor, layer_output: Tensor, *weights: Tensor) -> Outputs:
        query, rms_weight, output_rms_weight = weights
        joined = prefix + layer_output
        blocks = [block.contiguous() for block in bank.unbind(1)]
        return fused_attnres(query, [*blocks, joined], rms_weight, output_rms_weight, rms_eps=EPS), joined

    def forward(*tensors: Tensor) -> Tensor:
        *blocks, query, rms_weight = tensors
        return fused_attnres(query, blocks if case["listed"] else blocks[0].unbind(), rms_weight, rms_eps=EPS)

    return of_bank if is_bank(case) else forward


def traffic(case: Case, mode: str) -> int:
    """Forward: v read, h written. Backward: v and dh read, dv written. Parameters and statistics once each.

    A bank: also the prefix, the layer's output and their sum, which is a source; h, read by the backward, and RMSNorm(h).
    """
    tokens, n_sources, width = case["tokens"], case["blocks"] + is_bank(case), case["width"]
    n_weights = 2 + is_bank(case)
    row, parameters = tokens * width * DTYPE.itemsize, n_weights * width * DTYPE.itemsize
    statistics = (2 * n_sources + 1 + is_bank(case)) * tokens * STATISTIC_BYTES
    if mode == "backward":
        return (2 * n_sources + 1 + 2 * is_bank(case)) * row + 2 * parameters + statistics
    forward_rows = n_sources + 1 + 3 * is_bank(case)
    return forward_rows * row + parameters + (statistics if mode == "forward" else 0)


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
        "fla_gluon": fla_gluon,
    },
    reference=reference,
    traffic=traffic,
    sweeps=SWEEPS,
    peers=("liger-kernel", "fla-core"),
    host_cases=(case(16, 8, 256), *(case(16, n, 256, listed=True) for n in (8, 16))),
)
