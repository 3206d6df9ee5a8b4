"""npu_rms_norm.rms_norm beside its peers: `npu-bench rms_norm`, `npu-bench stages rms_norm`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import npu_rms_norm
import torch
from npu_bench import Benchmark, Case, Stage, Sweep, UnavailableError, over_stand_in
from npu_rms_norm import launch
from npu_rms_norm.operators import OPERATORS
from npu_tiling import device_for
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

EPS = 1e-6
DTYPE = torch.bfloat16
RSTD_BYTES = 4
OPTIONS = (EPS, 0.0, "llama", DTYPE, False)


# A case's x has a shape, and lies at the start of the last dimension of its storage.
def case(rows: int, width: int, name: str | None = None, x: float | str | None = None) -> Case:
    shape = (rows, width)
    return Case(name or f"{rows}x{width}", {"shape": shape, "storage": shape}, x)


def heads_case(batch: int, tokens: int, heads: int, kv_heads: int, width: int) -> Case:
    """q of a fused q, k, v projection, normalised over each head: rows that lie in a wider tensor."""
    shape = (batch, tokens, heads, width)
    storage = (batch, tokens, (heads + 2 * kv_heads) * width)
    return Case(f"q_{batch}x{tokens}x{heads}x{width}", {"shape": shape, "storage": storage})


def gated_case(tokens: int, heads: int, width: int) -> Case:
    """The norm of each head's output, gated by a part of a fused projection (Qwen3-Next)."""
    shape = (tokens, heads, width)
    return Case(f"gated_{tokens}x{heads}x{width}", {"shape": shape, "storage": shape, "gated": True})


CASES = (
    case(1, 4096, "decode_1x4096"),
    case(2048, 512),
    case(32768, 4096),
    case(8192, 16384),
    case(4096, 65536),
    case(262144, 128),
    heads_case(4, 2048, 32, 8, 128),
    gated_case(8192, 32, 128),
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
    shape, width = case["shape"], case["shape"][-1]
    x = torch.randn(case["storage"], dtype=DTYPE, device=device)
    used = torch.Size(shape[len(case["storage"]) - 1 :]).numel()
    x = x[..., :used].view(shape)
    weight = 1 + 0.1 * torch.randn(width, dtype=torch.float32, device=device)
    found = {"x": x.detach().requires_grad_(), "weight": weight.to(DTYPE).requires_grad_()}
    if is_gated(case):
        fused = torch.randn(shape[0], 2 * shape[1] * width, dtype=DTYPE, device=device)
        found["gate"] = fused[:, : shape[1] * width].unflatten(1, shape[1:]).detach().requires_grad_()
    return found


def is_gated(case: Case) -> bool:
    return bool(case.parameters.get("gated", False))


def without_gate(case: Case) -> None:
    if is_gated(case):
        raise UnavailableError("it has no gate")


def reference(x: Tensor, weight: Tensor, gate: Tensor | None = None) -> Tensor:
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight
    return y if gate is None else y * torch.nn.functional.silu(gate)


def hugging_face(x: Tensor, weight: Tensor) -> Tensor:
    """The forward of transformers' LlamaRMSNorm."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * wide.to(x.dtype)


def hugging_face_gated(x: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
    """The forward of transformers' Qwen3NextRMSNormGated."""
    return (hugging_face(x, weight) * torch.nn.functional.silu(gate.to(torch.float32))).to(x.dtype)


def ours(case: Case, device: torch.device) -> Callable[..., Tensor]:
    if is_gated(case):
        return lambda x, weight, gate: npu_rms_norm.gated_rms_norm(x, gate, weight, EPS)
    return lambda x, weight: npu_rms_norm.rms_norm(x, weight, EPS)


def pytorch(case: Case, device: torch.device) -> Callable[..., Tensor]:
    plain = lambda x, weight: torch.nn.functional.rms_norm(x, weight.shape, weight, EPS)  # noqa: E731
    if is_gated(case):
        return lambda x, weight, gate: plain(x, weight) * torch.nn.functional.silu(gate)
    return plain


def eager_formula(case: Case, device: torch.device) -> Callable[..., Tensor]:
    return hugging_face_gated if is_gated(case) else hugging_face


def flash_linear_attention(case: Case, device: torch.device) -> Callable[..., Tensor]:
    if not is_gated(case):
        raise UnavailableError("it is timed for gates alone")
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
    without_gate(case)
    if device.type == "cpu":
        raise UnavailableError("liger-kernel has no kernels for a CPU")
    try:
        from liger_kernel.ops import LigerRMSNormFunction  # type: ignore[import-not-found]
    except ImportError as error:
        raise UnavailableError(str(error)) from None
    return lambda x, weight: LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False)


def quack(case: Case, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    without_gate(case)
    if device.type != "cuda":
        raise UnavailableError("quack-kernels runs on CUDA")
    try:
        from quack import rmsnorm  # type: ignore[import-not-found]
    except ImportError as error:
        raise UnavailableError(str(error)) from None
    return lambda x, weight: rmsnorm(x, weight, eps=EPS)


def ascend_vendor(case: Case, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    without_gate(case)
    if device.type != "npu":
        raise UnavailableError("torch_npu's operators run on an NPU")
    if over_stand_in():
        raise UnavailableError("the stand-in of CANN has none of the vendor's fused operators")
    import torch_npu  # type: ignore[import-not-found]

    if not hasattr(torch_npu, "npu_rms_norm"):
        raise UnavailableError(f"torch_npu {torch_npu.__version__} has no npu_rms_norm")
    return lambda x, weight: torch_npu.npu_rms_norm(x, weight, EPS)[0]


def traffic(case: Case, mode: str) -> int:
    """Forward: x read, y written. Backward: x and dy read, dx written. Gates; parameters and statistics once each."""
    *leading, width = case["shape"]
    rows = torch.Size(leading).numel()
    tensor, parameter, rstd = rows * width * DTYPE.itemsize, width * DTYPE.itemsize, rows * RSTD_BYTES
    gate = tensor if is_gated(case) else 0
    if mode == "backward":
        return 3 * tensor + 2 * gate + 2 * parameter + rstd
    return 2 * tensor + gate + parameter + (rstd if mode == "forward" else 0)


def host_stages(device: torch.device) -> Sequence[Stage]:
    """From the Python call to the launch, at 2048x512: each stage called by itself, with the arguments that it gets."""
    chip = device_for(device)
    if chip is None:
        raise UnavailableError("a CPU runs plain PyTorch and launches nothing")
    x, weight = inputs(CASES[1], device).values()
    plain_x, plain_weight = x.detach(), weight.detach()
    forward = partial(launch.forward.launch_forward, plain_x, None, plain_weight, None, None, *OPTIONS, True, chip)
    captured = _arguments(forward, (launch.forward, "plan_strided_rows"), (launch.arguments.KERNELS, "launch"))
    implementation = partial(
        OPERATORS.below_autograd, "rms_norm", plain_x, plain_weight, None, *OPTIONS[:3], False, *OPTIONS[3:], True
    )
    return [
        Stage("public function, with gradients", partial(npu_rms_norm.rms_norm, x, weight, EPS), ["implementation"]),
        Stage("public function, no gradients", partial(npu_rms_norm.rms_norm, plain_x, plain_weight, EPS)),
        Stage(
            "through the dispatcher",
            partial(torch.ops.npu_rms_norm.rms_norm, x, weight, None, *OPTIONS[:3], False, *OPTIONS[3:], False),
        ),
        Stage("implementation", implementation, ["launch.forward"]),
        Stage("launch.forward", forward, ["allocation of y and rstd", "plan look-up", "kernel launch"]),
        Stage("allocation of y and rstd", partial(_allocate, plain_x)),
        Stage("plan look-up", captured["plan_strided_rows"]),
        Stage("kernel launch", captured["launch"]),
    ]


def _allocate(x: Tensor) -> tuple[Tensor, Tensor]:
    return allocate(x, x.shape, x.dtype), allocate(x, x.shape[:-1], torch.float32)


def _arguments(call: Callable[[], Any], *functions: tuple[Any, str]) -> dict[str, Callable[[], Any]]:
    """The calls that `call` makes of these functions, ready to be made again; each is given by its owner and name."""
    captured: dict[str, Callable[[], Any]] = {}
    for owner, name in functions:
        function = getattr(owner, name)
        with mock.patch.object(owner, name, wraps=function) as spy:
            call()
        captured[name] = partial(function, *spy.call_args.args, **spy.call_args.kwargs)
    return captured


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
    peers=("liger-kernel", "quack-kernels", "fla-core"),
    host_cases=(case(16, 256),),
    host_stages=host_stages,
)
