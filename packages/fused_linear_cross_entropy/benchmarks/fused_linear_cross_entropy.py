"""The loss and its gradients beside peers: `npu-bench fused_linear_cross_entropy`.

Modes "full" (gradients, time and memory) and "no-grad-forward" (the loss alone) are what training and evaluation take;
"forward" includes the gradients where a provider computes them ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import npu_fused_linear_cross_entropy
import torch
from linear_cross_entropy_benchmark import liger, quack
from linear_cross_entropy_benchmark.compiled import compiled_chunks
from linear_cross_entropy_benchmark.exact import ExactLoss
from npu_bench import Benchmark, Case, Sweep, UnavailableError, over_stand_in
from torch import Tensor

DTYPE = torch.bfloat16
FP32_BYTES = 4
LOSS_GRADIENT_READS = 2 * FP32_BYTES  # one in the scaling of each of two gradients
FEW_TOKENS = 4096
LOW_MEMORY = 32 * 2**20 / 4096  # bytes a token, of which liger-kernel 0.8.5 takes as many above its gradients

VOCABULARIES = (2048, 4096, 8192, 16384, 32000, 50257, 65536, 128256, 256000)
HEADS = {
    "GPT-2": (768, 50257),
    "Qwen3-0.6B": (1024, 151936),
    "Qwen3-1.7B": (2048, 151936),
    "Qwen3-4B": (2560, 151936),
    "gpt-oss": (2880, 201088),
    "Llama-3.1-8B": (4096, 128256),
    "Qwen3-32B": (5120, 151936),
    "DeepSeek-V3": (7168, 129280),
}
"""Width and vocabulary of published models."""

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
    "heads": Sweep(
        "head",
        "tokens, hidden size and vocabulary of a model",
        sorted(
            (
                case(2**i, *head, name=f"{2**i}x{head[0]}x{head[1]}", x=f"{model}, {2**i}")
                for model, head in HEADS.items()
                for i in range(10, 17)
            ),
            key=lambda case: (case["tokens"] * case["vocabulary"] * case["width"], case["tokens"] * case["vocabulary"]),
        ),
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
    loss: Tensor = ExactLoss.apply(x, weight, target)
    return loss


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
        "liger": liger.triton,
        "liger_cutedsl": liger.cutedsl,
        "liger_sm90": liger.sm90,
        "liger_cutile": liger.cutile,
        "quack": quack.chunks_of(4096),
        "quack_2048": quack.chunks_of(2048),
        "quack_whole": quack.whole,
        "cut_cross_entropy": cut_cross_entropy,
        "torch_npu": ascend_vendor,
    },
    reference=reference,
    traffic=traffic,
    flops=flops,
    sweeps=SWEEPS,
    tolerance=tolerance,
    peers=("liger-kernel", "quack-kernels", "cut-cross-entropy"),
    host_cases=(case(64, 64, 4096),),
    modes=("full", "no-grad-forward", "forward", "backward"),
)
