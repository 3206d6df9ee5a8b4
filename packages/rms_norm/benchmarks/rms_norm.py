"""npu_rms_norm.rms_norm beside its peers: `npu-bench rms_norm`, `npu-bench stages rms_norm`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import npu_rms_norm
import torch
from npu_bench import Benchmark, Case, Sweep, UnavailableError, over_stand_in
from rms_norm_benchmark.formulas import EPS, hugging_face, hugging_face_gated, quantised_formula, reference
from rms_norm_benchmark.stages import host_stages
from torch import Tensor

DTYPE = torch.bfloat16
FP8 = torch.float8_e4m3fn
MOST = {torch.int8: 127.0, FP8: 448.0}
RSTD_BYTES = 4


# A case's x has a shape, and lies at the start of the last dimension of its storage.
def case(rows: int, width: int, name: str | None = None, x: float | str | None = None) -> Case:
    shape = (rows, width)
    return Case(name or f"{rows}x{width}", {"shape": shape, "storage": shape}, x)


def heads_case(batch: int, tokens: int, heads: int, kv_heads: int, width: int, *, per_head: bool = False) -> Case:
    """q of a fused q, k, v projection, normalised over each head: rows that lie in a wider tensor."""
    shape = (batch, tokens, heads, width)
    storage = (batch, tokens, (heads + 2 * kv_heads) * width)
    name = f"q_{batch}x{tokens}x{heads}x{width}" + "_weights" * per_head
    return Case(name, {"shape": shape, "storage": storage, "per_head": per_head})


def gated_case(tokens: int, heads: int, width: int, *, per_head: bool = False) -> Case:
    """The norm of each head's output, gated by a part of a fused projection (Qwen3-Next; Mamba 2 with groups)."""
    shape = (tokens, heads, width)
    name = f"gated_{tokens}x{heads}x{width}" + "_weights" * per_head
    return Case(name, {"shape": shape, "storage": shape, "gated": True, "per_head": per_head})


def bias_case(rows: int, width: int) -> Case:
    shape = (rows, width)
    return Case(f"bias_{rows}x{width}", {"shape": shape, "storage": shape, "bias": True})


def added_case(rows: int, width: int) -> Case:
    """The norm of x + residual, and that sum."""
    shape = (rows, width)
    return Case(f"add_{rows}x{width}", {"shape": shape, "storage": shape, "added": True})


def quantised_case(rows: int, width: int, dtype: torch.dtype, *, added: bool = False) -> Case:
    """In 8 bits with a scale for each row, of x or of x + residual."""
    shape = (rows, width)
    name = "add_" * added + {torch.int8: "int8", FP8: "fp8"}[dtype] + f"_{rows}x{width}"
    return Case(name, {"shape": shape, "storage": shape, "quantised": dtype, "added": added})


CASES = (
    case(1, 4096, "decode_1x4096"),
    *(case(*size) for size in ((2048, 512), (65536, 512), (262144, 128))),
    *(case(16384, width) for width in (2560, 2880, 3584, 7168)),
    *(case(8192, width) for width in (4096, 5120, 8192, 16384)),
    case(32768, 4096),
    case(4096, 65536),
    added_case(8192, 4096),
    heads_case(4, 2048, 32, 8, 128),
    heads_case(4, 2048, 32, 8, 128, per_head=True),
    gated_case(8192, 32, 128),
    gated_case(8192, 32, 128, per_head=True),
    gated_case(32768, 1, 2048),
    gated_case(16384, 1, 4096),
    bias_case(8192, 4096),
    quantised_case(8192, 4096, torch.int8),
    quantised_case(8192, 4096, torch.int8, added=True),
    quantised_case(8192, 4096, FP8),
)
SWEEPS = {
    "between": Sweep(
        "hidden",
        "hidden size between powers of two, 16384 tokens",
        [case(16384, d, x=d) for d in (2560, 2880, 3072, 3584, 5120, 6144, 7168)],
    ),
    "tokens": Sweep("tokens", "tokens, hidden size 4096", [case(n, 4096, x=n) for n in (2**i for i in range(8, 19))]),
    "hidden": Sweep("hidden", "hidden size, 4096 tokens", [case(4096, d, x=d) for d in (2**i for i in range(7, 17))]),
    "short": Sweep("hidden", "hidden size, 2048 tokens", [case(2048, d, x=d) for d in (512, 1024, 2048)]),
    "model": Sweep(
        "model",
        "hidden size of a model, 8192 tokens",
        [
            case(8192, width, x=model)
            for model, width in {
                "Qwen2.5-0.5B": 896,
                "Llama-3.2-1B": 2048,
                "Llama-3.1-8B": 4096,
                "Qwen2.5-32B": 5120,
                "DeepSeek-V3": 7168,
                "Llama-3.1-70B": 8192,
                "Llama-3.1-405B": 16384,
            }.items()
        ],
    ),
}


def inputs(case: Case, device: torch.device) -> Mapping[str, Tensor]:
    """x, weight, and what else the case has; what is quantised has no gradient."""
    shape, width = case["shape"], case["shape"][-1]
    x = torch.randn(case["storage"], dtype=DTYPE, device=device)
    used = torch.Size(shape[len(case["storage"]) - 1 :]).numel()
    x = x[..., :used].view(shape)
    parameter = shape[-2:] if has(case, "per_head") else width
    weight = 1 + 0.1 * torch.randn(parameter, dtype=torch.float32, device=device)
    found = {"x": x.detach(), "weight": weight.to(DTYPE)}
    if has(case, "gated"):
        fused = torch.randn(shape[0], 2 * shape[1] * width, dtype=DTYPE, device=device)
        found["gate"] = fused[:, : shape[1] * width].unflatten(1, shape[1:]).detach()
    if has(case, "bias"):
        found["bias"] = 0.1 * torch.randn(width, dtype=DTYPE, device=device)
    if has(case, "quantised"):
        found["most"] = torch.tensor(MOST[case["quantised"]], device=device)
    if has(case, "added"):
        found["residual"] = torch.randn_like(found["x"])
    return {name: tensor.requires_grad_(not has(case, "quantised")) for name, tensor in found.items()}


def has(case: Case, option: str) -> bool:
    return bool(case.parameters.get(option, False))


def without(case: Case, *options: str) -> None:
    """Raises UnavailableError for a provider that has none of these."""
    names = {
        "gated": "gate",
        "bias": "bias",
        "per_head": "weight for each head",
        "quantised": "quantised result",
        "added": "residual",
    }
    for option in options:
        if has(case, option):
            raise UnavailableError(f"it has no {names[option]}")


def ours(case: Case, device: torch.device) -> Callable[..., Any]:
    if has(case, "gated"):
        return lambda x, weight, gate: npu_rms_norm.gated_rms_norm(x, gate, weight, EPS)
    if has(case, "quantised"):
        options = {"eps": EPS, "casting_mode": "gemma", "dtype": case["quantised"]}
        if has(case, "added"):
            return lambda x, weight, most, residual: npu_rms_norm.add_rms_norm_dynamic_quant(x, residual, weight, **options)
        return lambda x, weight, most: npu_rms_norm.rms_norm_dynamic_quant(x, weight, **options)
    if has(case, "added"):
        return lambda x, weight, residual: tuple(npu_rms_norm.add_rms_norm(x, residual, weight, EPS))
    return lambda x, weight, bias=None: npu_rms_norm.rms_norm(x, weight, EPS, bias=bias)


def pytorch(case: Case, device: torch.device) -> Callable[..., Tensor]:
    without(case, "quantised")
    plain = lambda x, weight: torch.nn.functional.rms_norm(x, weight.shape, weight, EPS)  # noqa: E731
    if has(case, "per_head"):
        plain = lambda x, weight: torch.nn.functional.rms_norm(x, weight.shape[-1:], None, EPS) * weight  # noqa: E731
    if has(case, "gated"):
        return lambda x, weight, gate: plain(x, weight) * torch.nn.functional.silu(gate)
    if has(case, "added"):
        return lambda x, weight, residual: (plain(x + residual, weight), x + residual)
    return lambda x, weight, bias=None: plain(x, weight) if bias is None else plain(x, weight) + bias


def eager_formula(case: Case, device: torch.device) -> Callable[..., Any]:
    if has(case, "quantised"):
        return partial(quantised_formula, case["quantised"])
    if has(case, "added"):
        return lambda x, weight, residual: (hugging_face(x + residual, weight), x + residual)
    return hugging_face_gated if has(case, "gated") else hugging_face


def flash_linear_attention(case: Case, device: torch.device) -> Callable[..., Tensor]:
    if not has(case, "gated"):
        raise UnavailableError("it is timed for gates alone")
    without(case, "per_head")
    if device.type == "cpu":
        raise UnavailableError("fla has no kernels for a CPU")
    try:
        from fla.modules.norm.fused_norm_gate import rms_norm_gated  # type: ignore[import-not-found]
    except ImportError as error:
        raise UnavailableError(str(error)) from None
    return lambda x, weight, gate: rms_norm_gated(x, gate, weight, None, activation="swish", eps=EPS)


def compiled_formula(case: Case, device: torch.device) -> Callable[..., Tensor]:
    import torch._functorch.config as functorch

    torch._dynamo.reset()  # every case is compiled for its own shape; none counts against the limit of recompilations
    functorch.donated_buffer = False  # buffers given away by the first backward would forbid to retain the graph
    return torch.compile(eager_formula(case, device), dynamic=False)


def liger(case: Case, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    without(case, "gated", "bias", "per_head", "quantised", "added")
    if device.type == "cpu":
        raise UnavailableError("liger-kernel has no kernels for a CPU")
    try:
        from liger_kernel.ops import LigerRMSNormFunction  # type: ignore[import-not-found]
    except ImportError as error:
        raise UnavailableError(str(error)) from None
    return lambda x, weight: LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False)


def quack(case: Case, device: torch.device) -> Callable[..., Tensor]:
    without(case, "gated", "quantised", "added")
    if device.type != "cuda":
        raise UnavailableError("quack-kernels runs on CUDA")
    try:
        from quack import rmsnorm  # type: ignore[import-not-found]
    except ImportError as error:
        raise UnavailableError(str(error)) from None
    return lambda x, weight, bias=None: rmsnorm(x, weight, bias, eps=EPS)


def ascend_vendor(case: Case, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    without(case, "gated", "bias", "per_head", "quantised", "added")
    if device.type != "npu":
        raise UnavailableError("torch_npu's operators run on an NPU")
    if over_stand_in():
        raise UnavailableError("the stand-in of CANN has none of the vendor's fused operators")
    import torch_npu  # type: ignore[import-not-found]

    if not hasattr(torch_npu, "npu_rms_norm"):
        raise UnavailableError(f"torch_npu {torch_npu.__version__} has no npu_rms_norm")
    return lambda x, weight: torch_npu.npu_rms_norm(x, weight, EPS)[0]


def traffic(case: Case, mode: str) -> int:
    """Forward: x read, y written. Backward: x and dy read, dx written. Gates, residuals; parameters, statistics once."""
    *leading, width = case["shape"]
    rows = torch.Size(leading).numel()
    tensor, rstd = rows * width * DTYPE.itemsize, rows * RSTD_BYTES
    parameter = width * DTYPE.itemsize * (leading[-1] if has(case, "per_head") else 1) * (1 + has(case, "bias"))
    if has(case, "quantised"):
        result = tensor // DTYPE.itemsize
        return tensor * (3 if has(case, "added") else 1) + result + parameter + rstd  # as many scales
    gate = tensor if has(case, "gated") else 0
    added = tensor if has(case, "added") else 0  # forward the residual and the sum, backward the gradient of the sum
    if mode == "backward":
        return 3 * tensor + added + 2 * gate + 2 * parameter + rstd
    return 2 * tensor + 2 * added + gate + parameter + (rstd if mode == "forward" else 0)


def tolerance(case: Case) -> float | None:
    """Of what is quantised, a step and what its own neighbour rounds to: 8 bits are coarser than the inputs."""
    return 2.0**-4 if has(case, "quantised") else None


BENCHMARK = Benchmark(
    name="rms_norm",
    distribution="npu-rms-norm",
    cases=CASES,
    inputs=inputs,
    providers={
        "ours": ours,
        "torch": pytorch,
        "hf": eager_formula,
        "compile": compiled_formula,
        "liger": liger,
        "quack": quack,
        "fla": flash_linear_attention,
        "torch_npu": ascend_vendor,
    },
    reference=reference,
    traffic=traffic,
    sweeps=SWEEPS,
    tolerance=tolerance,
    peers=("liger-kernel", "quack-kernels", "fla-core"),
    host_cases=(case(16, 256),),
    host_stages=lambda device: host_stages(device, *inputs(CASES[1], device).values()),
)
