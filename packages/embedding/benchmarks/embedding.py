"""npu_embedding.embedding beside its peers: `npu-bench embedding`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import npu_embedding
import torch
from npu_bench import Benchmark, Case, Sweep, UnavailableError
from torch import Tensor

INDEX_BYTES = 8
KINDS = ("uniform", "zipf", "equal")
fp32, bf16 = torch.float32, torch.bfloat16

# Parameters of a case: n indices into a table [rows, width], and how they are distributed.


def case(n: int, width: int, rows: int, dtype: torch.dtype, kind: str = "uniform", x: float | str | None = None) -> Case:
    name = f"{n}x{width}_V{rows}_{'fp32' if dtype == fp32 else 'bf16'}_{kind}"
    return Case(name, {"n": n, "width": width, "rows": rows, "dtype": dtype, "kind": kind}, x)


def labelled(n: int, width: int, rows: int, dtype: torch.dtype, kind: str = "uniform") -> Case:
    """A case of a sweep over shapes that lie on no line."""
    return case(n, width, rows, dtype, kind, f"{n} of {rows} x {width}")


CASES = (
    *(case(16384, 768, 131072, fp32, kind) for kind in KINDS),
    *(case(32768, 4096, 128256, bf16, kind) for kind in KINDS),
    case(1024, 256, 1024, bf16),  # small enough to be emulated
)
SWEEPS = {
    "tokens": Sweep(
        "tokens",
        "tokens, 128256 rows of 4096",
        [case(n, 4096, 128256, bf16, "zipf", n) for n in (2**i for i in range(8, 18))],
    ),
    "vocabulary": Sweep(
        "vocabulary",
        "rows of 768 fp32, 16384 tokens",
        [case(16384, 768, v, fp32, x=v) for v in (2**i for i in range(10, 18))],
    ),
    "hidden": Sweep(
        "hidden",
        "hidden size, 16384 tokens of 32000",
        [case(16384, d, 32000, bf16, "zipf", d) for d in (2**i for i in range(6, 15))],
    ),
    "widths": Sweep(
        "widths",
        "widths of models, 16384 tokens of 65536",
        [case(16384, d, 65536, bf16, x=d) for d in (2560, 2880, 3072, 3584, 5120, 6144, 7168)],
    ),
    "few": Sweep(
        "few",
        "few tokens",
        [labelled(n, width, rows, bf16) for rows, width in ((50257, 768), (128256, 4096)) for n in (1, 8, 64, 512)],
    ),
    "shapes": Sweep(
        "shapes",
        "shapes of other tables",
        [
            labelled(16384, 768, 1024, fp32),
            labelled(16384, 2048, 151936, bf16, "zipf"),
            labelled(8192, 2880, 201088, bf16, "zipf"),
            labelled(16384, 2560, 65536, bf16),
            labelled(4096, 16384, 128256, bf16),
            labelled(65536, 2048, 151936, bf16, "zipf"),
        ],
    ),
    "model": Sweep(
        "model",
        "table of a model, 8192 tokens",
        [
            case(8192, width, rows, bf16, "zipf", model)
            for model, (rows, width) in {
                "GPT-2": (50257, 768),
                "Qwen2.5-0.5B": (151936, 896),
                "Llama-3.1-8B": (128256, 4096),
                "DeepSeek-V3": (129280, 7168),
                "Llama-3.1-405B": (128256, 16384),
            }.items()
        ],
    ),
}


def inputs(case: Case, device: torch.device) -> Mapping[str, Tensor]:
    n, rows = case["n"], case["rows"]
    if case["kind"] == "uniform":
        indices = torch.randint(0, rows, (n,), device=device)
    elif case["kind"] == "equal":
        indices = torch.full((n,), rows // 2, device=device)
    else:  # the r-th most frequent row 1 / r as often as the first; which row that is, is random
        frequency = 1 / torch.arange(1, rows + 1, dtype=torch.float64, device=device)
        ranks = torch.multinomial(frequency, n, replacement=True)
        indices = torch.randperm(rows, device=device)[ranks]
    weight = torch.randn(rows, case["width"], dtype=case["dtype"], device=device)
    return {"indices": indices, "weight": weight.requires_grad_()}


def reference(indices: Tensor, weight: Tensor) -> Tensor:
    return weight.index_select(0, indices)


def ours(case: Case, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    return npu_embedding.embedding


def pytorch(case: Case, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """On an NPU this is the vendor's operator (aclnn)."""
    return torch.nn.functional.embedding


def liger(case: Case, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    if device.type == "cpu":
        raise UnavailableError("liger-kernel has no kernels for a CPU")
    try:
        from liger_kernel.ops import LigerEmbeddingFunction  # type: ignore[import-not-found]
    except ImportError as error:
        raise UnavailableError(str(error)) from None
    return lambda indices, weight: LigerEmbeddingFunction.apply(weight, indices)


def traffic(case: Case, mode: str) -> int:
    """Forward: n rows read, n written. Backward: n rows read, the table written. The indices once each."""
    row = case["width"] * case["dtype"].itemsize
    written = case["rows"] if mode == "backward" else case["n"]
    return (case["n"] + written) * row + case["n"] * INDEX_BYTES


BENCHMARK = Benchmark(
    name="embedding",
    distribution="npu-embedding",
    cases=CASES,
    inputs=inputs,
    providers={"ours": ours, "torch": pytorch, "liger": liger},
    reference=reference,
    traffic=traffic,
    # One row is a sum of n fp32 numbers of either sign, and is compared with the scale of a gradient that is zero elsewhere.
    tolerance=lambda case: 2**-12 if case["kind"] == "equal" and case["dtype"] == fp32 else None,
    sweeps=SWEEPS,
    peers=("liger-kernel",),
    host_cases=(case(64, 64, 1024, bf16),),
)
