"""The loss and its gradients beside peers: `npu-bench fused_linear_cross_entropy`.

Modes "full" (gradients, time and memory) and "no-grad-forward" (the loss alone) are what training and evaluation take;
"forward" includes the gradients where a provider computes them ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import npu_fused_linear_cross_entropy
import torch
from npu_bench import Benchmark, Case, Sweep, UnavailableError, over_stand_in
from torch import Tensor

DTYPE = torch.bfloat16
FP32_BYTES = 4
LOSS_GRADIENT_READS = 2 * FP32_BYTES  # one in the scaling of each of two gradients
FEW_TOKENS = 4096
CHUNK = 1024  # tokens of a chunk of the compiled loss
LOW_MEMORY = 32 * 2**20 / 4096  # bytes a token, of which liger-kernel 0.8.5 takes as many above its gradients

VOCABULARIES = (2048, 4096, 8192, 16384, 32000, 50257, 65536, 128256, 256000)

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def case(
    tokens: int,
    width: int,
    vocabulary: int,
    name: str | None = None,
    x: float | str | None = None,
    ignored: int = 0,
) -> Case:
    """`ignored`: percent of the tokens."""
    sizes = {"tokens": tokens, "width": width, "vocabulary": vocabulary}
    if ignored:
        sizes["ignored"] = ignored
        name = name or f"{tokens}x{width}x{vocabulary}, {ignored} % ignored"
    return Case(name or f"{tokens}x{width}x{vocabulary}", sizes, x)


CASES = (
    case(4096, 4096, 128256, "BT4096"),
    case(16384, 4096, 128256, "BT16384"),
    case(1024, 1024, 32000),
    case(64, 64, 32000, "small"),
)
SWEEPS = {
    "tokens": Sweep("tokens", "tokens, 4096 x 128256", [case(2**i, 4096, 128256, x=2**i) for i in range(8, 16)]),
    "vocabulary": Sweep("vocabulary", "vocabulary, 4096 tokens of 4096", [case(4096, 4096, v, x=v) for v in VOCABULARIES]),
    "hidden": Sweep(
        "hidden",
        "hidden size, 4096 tokens, 32000 entries",
        [case(4096, d, 32000, x=d) for d in (2**i for i in range(6, 14))],
    ),
    "ignored": Sweep(
        "ignored",
        "percent of the tokens that are ignored, 8192 of 4096 x 128256",
        [case(8192, 4096, 128256, x=percent, ignored=percent) for percent in (10, 50, 90)],
    ),
    "model": Sweep(
        "model",
        "hidden size and vocabulary of a model, 4096 tokens",
        [
            case(4096, width, vocabulary, x=model)
            for model, (width, vocabulary) in {
                "GPT-2": (768, 50257),
                "Qwen2.5-0.5B": (896, 151936),
                "Llama-3.2-1B": (2048, 128256),
                "Llama-3.1-8B": (4096, 128256),
                "DeepSeek-V3": (7168, 129280),
            }.items()
        ],
    ),
}


def inputs(case: Case, device: torch.device) -> Mapping[str, Tensor]:
    x = torch.randn(case["tokens"], case["width"], dtype=DTYPE, device=device)
    weight = torch.randn(case["vocabulary"], case["width"], dtype=DTYPE, device=device) * case["width"] ** -0.5
    target = torch.randint(0, case["vocabulary"], (case["tokens"],), device=device)
    target[torch.randperm(case["tokens"], device=device)[counted(case) :]] = -100
    return {"x": x.requires_grad_(), "weight": weight.requires_grad_(), "target": target}


def counted(case: Case) -> int:
    """Tokens that are not ignored."""
    tokens: int = case["tokens"]
    return tokens - tokens * case.parameters.get("ignored", 0) // 100


def reference(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(x @ weight.t(), target)


def ours(case: Case, device: torch.device) -> Loss:
    return npu_fused_linear_cross_entropy.fused_linear_cross_entropy


def ours_counted(case: Case, device: torch.device) -> Loss:
    """Told how many tokens count, so that the others take part in no product."""
    if "ignored" not in case.parameters:
        raise UnavailableError("no token of this case is ignored")
    return lambda x, weight, target: npu_fused_linear_cross_entropy.fused_linear_cross_entropy(
        x, weight, target, counted_tokens=counted(case)
    )


def ours_low_memory(case: Case, device: torch.device) -> Loss:
    budget = int(LOW_MEMORY * case["tokens"])
    return lambda x, weight, target: npu_fused_linear_cross_entropy.fused_linear_cross_entropy(
        x, weight, target, memory_budget=budget
    )


def ours_fp32(case: Case, device: torch.device) -> Loss:
    """The weight's gradient summed in fp32 and rounded once, not once a chunk."""
    return lambda x, weight, target: npu_fused_linear_cross_entropy.fused_linear_cross_entropy(
        x, weight, target, accum_dtype=torch.float32
    )


def pytorch(case: Case, device: torch.device) -> Loss:
    return lambda x, weight, target: torch.nn.functional.cross_entropy(torch.nn.functional.linear(x, weight).float(), target)


def pytorch_narrow(case: Case, device: torch.device) -> Loss:
    """Logits in bf16, as a model's head and loss have them where nobody widens them."""
    return lambda x, weight, target: torch.nn.functional.cross_entropy(torch.nn.functional.linear(x, weight), target)


def pytorch_fused(case: Case, device: torch.device) -> Loss:
    fused = getattr(torch.nn.functional, "linear_cross_entropy", None)
    if fused is None:
        raise UnavailableError(f"torch {torch.__version__} has no linear_cross_entropy")
    return lambda x, weight, target: fused(x, weight, target)


def compiled_chunks(case: Case, device: torch.device) -> Loss:
    """What one would write with torch.compile: gradients computed ahead, chunk by chunk, what is between products fused."""

    torch._dynamo.reset()

    @torch.compile
    def chunk_gradient(logits: Tensor, target: Tensor, count: int) -> tuple[Tensor, Tensor]:
        wide = logits.float()
        lse = wide.logsumexp(1)
        nll = lse - wide.gather(1, target.unsqueeze(1)).squeeze(1)
        gradient = torch.exp(wide - lse.unsqueeze(1))
        columns = torch.arange(wide.shape[1], device=wide.device)
        gradient = torch.where(columns == target.unsqueeze(1), gradient - 1, gradient) / count
        return nll.sum() / count, gradient.to(logits.dtype)

    class Chunked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
            dx, dweight = torch.empty_like(x), torch.zeros_like(weight)
            loss = torch.zeros((), device=x.device)
            for first in range(0, x.shape[0], CHUNK):
                part, labels = x[first : first + CHUNK], target[first : first + CHUNK]
                found, gradient = chunk_gradient(part @ weight.t(), labels, x.shape[0])
                loss += found
                torch.mm(gradient, weight, out=dx[first : first + CHUNK])
                torch.addmm(dweight, gradient.t(), part, out=dweight)
            ctx.save_for_backward(dx, dweight)
            return loss

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
            dx, dweight = ctx.saved_tensors
            return dx * gradient.to(dx.dtype), dweight * gradient.to(dx.dtype), None

    return Chunked.apply


def liger(case: Case, device: torch.device) -> Loss:
    if device.type == "cpu":
        raise UnavailableError("liger-kernel has no kernels for a CPU")
    try:
        from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction  # type: ignore[import-not-found]
    except ImportError as error:
        raise UnavailableError(str(error)) from None
    return lambda x, weight, target: LigerFusedLinearCrossEntropyFunction.apply(x, weight, target)[0]


def ascend_vendor(case: Case, device: torch.device) -> Loss:
    """The vendor's loss after a linear layer."""
    if device.type != "npu":
        raise UnavailableError("torch_npu's operators run on an NPU")
    if over_stand_in():
        raise UnavailableError("the stand-in of CANN has none of the vendor's fused operators")
    import torch_npu  # type: ignore[import-not-found]

    if not hasattr(torch_npu, "npu_cross_entropy_loss"):
        raise UnavailableError(f"torch_npu {torch_npu.__version__} has no npu_cross_entropy_loss")
    return lambda x, weight, target: torch_npu.npu_cross_entropy_loss(torch.nn.functional.linear(x, weight), target)[0]


def cut_cross_entropy(case: Case, device: torch.device) -> Loss:
    if device.type != "cuda":
        raise UnavailableError("cut-cross-entropy's kernels are CUDA's")
    try:
        from cut_cross_entropy import linear_cross_entropy  # type: ignore[import-not-found]
    except ImportError as error:
        raise UnavailableError(str(error)) from None
    return linear_cross_entropy


def tolerance(case: Case) -> float:
    """A gradient that is summed in bf16 is rounded once a chunk, by us and by peers: its error grows with their root."""
    return 2**-5 * max(1.0, case["tokens"] / FEW_TOKENS) ** 0.5


def traffic(case: Case, mode: str) -> int:
    """What the pass between the products must move: fp32 logits read once, bf16 written once."""
    logits = case["tokens"] * case["vocabulary"]
    if mode == "backward":
        return LOSS_GRADIENT_READS
    return logits * (FP32_BYTES if mode == "no-grad-forward" else FP32_BYTES + DTYPE.itemsize)


def flops(case: Case, mode: str) -> int:
    """One product forward, two backward."""
    product = 2 * case["tokens"] * case["width"] * case["vocabulary"]
    return 2 * product if mode == "backward" else product


BENCHMARK = Benchmark(
    name="fused_linear_cross_entropy",
    distribution="npu-fused-linear-cross-entropy",
    cases=CASES,
    inputs=inputs,
    providers={
        "ours": ours,
        "ours_counted": ours_counted,
        "ours_low_memory": ours_low_memory,
        "ours_fp32": ours_fp32,
        "torch": pytorch_narrow,
        "torch_fp32": pytorch,
        "torch_fused": pytorch_fused,
        "compile": compiled_chunks,
        "liger": liger,
        "cut_cross_entropy": cut_cross_entropy,
        "torch_npu": ascend_vendor,
    },
    reference=reference,
    traffic=traffic,
    flops=flops,
    sweeps=SWEEPS,
    tolerance=tolerance,
    peers=("liger-kernel", "cut-cross-entropy"),
    host_cases=(case(64, 64, 4096),),
    modes=("full", "no-grad-forward", "forward", "backward"),
)
