"""Models of transformers at their real sizes, with `patch` and without: `npu-bench tools/bench_model.py`.

Weights are random, tokens too. What nobody replaces is PyTorch's.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any
from unittest import mock

import npu_embedding
import npu_fused_linear_cross_entropy
import npu_rms_norm
import torch
import transformers
from npu_bench import Benchmark, Case, UnavailableError, error_of_whole
from torch import Tensor, nn

DTYPE = torch.bfloat16
BATCH, LENGTH = 4, 2048
LLAMA = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
QWEN = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
GEMMA = {"hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def case(name: str, kind: str, vocabulary: int, kv_heads: int, head_dim: int, tokens: tuple[int, int], **sizes: int) -> Case:
    heads = {"num_key_value_heads": kv_heads, "head_dim": head_dim}
    config = {"vocab_size": vocabulary, "tie_word_embeddings": True, "use_cache": False, **heads, **sizes}
    return Case(name, {"kind": kind, "tokens": tokens, "config": config})


CASES = (
    case("llama_3.2_1b", "Llama", 128256, 8, 64, (BATCH, LENGTH), **LLAMA),
    case("qwen3_0.6b", "Qwen3", 151936, 8, 128, (BATCH, LENGTH), **QWEN),
    case("gemma3_1b", "Gemma3", 262144, 1, 256, (BATCH, LENGTH), **GEMMA),
    case("small", "Qwen3", 512, 2, 16, (2, 32), **SMALL),
)


def model_of(case: Case, device: torch.device) -> Any:
    kind = case["kind"]
    suffix = "TextConfig" if kind == "Gemma3" else "Config"
    config = getattr(transformers, kind + suffix)(**case["config"])
    with device:
        return getattr(transformers, f"{kind}ForCausalLM")(config).to(DTYPE)


def inputs(case: Case, device: torch.device) -> Mapping[str, Tensor]:
    found: dict[str, Tensor] = dict(model_of(case, device).named_parameters())
    return {"tokens": torch.randint(case["config"]["vocab_size"], case["tokens"], device=device), **found}


class Loss:
    """The loss of a model for tokens and its parameters, which become those of the model."""

    def __init__(self, model: Any, call: Callable[..., Any], replaced: Callable[[], Any] = nullcontext) -> None:
        self._call, self._replaced = call, replaced  # the model, or what is compiled of it
        by_parameter: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    by_parameter.setdefault(id(parameter), []).append((module._parameters, name))
        self._places = [by_parameter[id(parameter)] for parameter in model.parameters()]

    def __call__(self, tokens: Tensor, *parameters: Tensor) -> Tensor:
        for places, parameter in zip(self._places, parameters, strict=True):
            for owner, name in places:
                owner[name] = parameter
        with self._replaced():
            loss: Tensor = self._call(input_ids=tokens, labels=tokens).loss
        return loss


def take_ours(model: nn.Module, memory_budget: int | None) -> None:
    npu_rms_norm.patch(model)
    npu_embedding.patch(model)
    npu_fused_linear_cross_entropy.patch(model, memory_budget=memory_budget)


def take_ligers(model: nn.Module, **wanted: bool) -> Callable[[], Any]:
    """Replaces what liger-kernel replaces. Returns a context in which the functions of transformers that it replaces are."""
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
    except ImportError as error:
        raise UnavailableError(str(error)) from None
    module = importlib.import_module(type(model).__module__)
    before = dict(vars(module))
    _apply_liger_kernel_to_instance(model, **wanted)
    after = {name: value for name, value in vars(module).items() if before.get(name) is not value}
    for name in after:
        setattr(module, name, before[name])

    @contextmanager
    def replaced() -> Iterator[None]:
        with mock.patch.multiple(module, **after):
            yield

    return replaced


def causal(
    _: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **__: Any
) -> tuple[Tensor, None]:
    """What eager models do without a window: compiled ones are given a mask, with which all products are taken."""
    assert mask is None
    y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
    return y.transpose(1, 2).contiguous(), None


transformers.AttentionInterface.register("causal", causal)


def provider(
    *,
    ours: bool = False,
    memory_budget: int | None = None,
    compiled: bool = False,
    ligers: Mapping[str, bool] | None = None,
) -> Any:
    def build(case: Case, device: torch.device) -> Loss:
        model = model_of(case, device)
        replaced = nullcontext if ligers is None else take_ligers(model, **ligers)
        if ours:
            take_ours(model, memory_budget)
        if compiled:
            torch._dynamo.reset()
            if case["kind"] != "Gemma3":
                model.set_attn_implementation("causal")
        return Loss(model, torch.compile(model, fullgraph=True, dynamic=False) if compiled else model, replaced)

    return build


NOT_OURS = {"rms_norm": False, "cross_entropy": False, "fused_linear_cross_entropy": False}  # rope and the MLP are left
PROVIDERS = {
    "ours": provider(ours=True),
    "ours_and_ligers_rest": provider(ours=True, ligers=NOT_OURS),
    "ours_and_ligers_rest_in_256_mib": provider(ours=True, memory_budget=2**28, ligers=NOT_OURS),
    "liger": provider(ligers={}),
    "plain": provider(),
    "ours_compiled": provider(ours=True, compiled=True),
    "compiled": provider(compiled=True),
}


def reference(tokens: Tensor, *parameters: Tensor) -> Tensor:
    """In fp32 at most: in fp64 the logits of all tokens do not fit."""
    case = next(case for case in CASES if case["config"]["vocab_size"] == len(parameters[0]))
    wide = [parameter.float() for parameter in parameters]
    model = model_of(case, tokens.device).float()
    return Loss(model, model)(tokens, *wide)


@cache
def matrices(name: str) -> int:
    """Elements of the matrices that tokens are multiplied with; the table is the head's."""
    case = next(case for case in CASES if case.name == name)
    return sum(parameter.numel() for parameter in model_of(case, torch.device("meta")).parameters() if parameter.dim() == 2)


def traffic(case: Case, mode: str) -> int:
    """Matrices once, and once more for their gradients."""
    return (2 if mode == "backward" else 1) * matrices(case.name) * DTYPE.itemsize


def flops(case: Case, mode: str) -> int:
    """Products with matrices, and causal attention; twice that backward."""
    (batch, length), config = case["tokens"], case["config"]
    attention = config["num_hidden_layers"] * config["num_attention_heads"] * config["head_dim"] * length
    forward = 2 * batch * length * (matrices(case.name) + attention)
    return 2 * forward if mode == "backward" else forward


BENCHMARK = Benchmark(
    name="model",
    distribution="npu-rms-norm",
    cases=CASES,
    inputs=inputs,
    providers=PROVIDERS,
    reference=reference,
    traffic=traffic,
    flops=flops,
    error=error_of_whole,  # a dozen layers in bf16: single elements are off by more than themselves
    tolerance=lambda case: 2**-2,
    peers=("npu-embedding", "npu-fused-linear-cross-entropy", "liger-kernel", "transformers"),
    modes=("full",),
)
