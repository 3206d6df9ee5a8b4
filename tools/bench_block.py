"""A transformer block, and a small model, with our operators and without: `npu-bench tools/bench_block.py`.

Compiled providers are one graph each (`fullgraph=True`): a graph break fails instead of costing time unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import npu_attn_res
import npu_embedding
import npu_fused_linear_cross_entropy
import npu_rms_norm
import torch
from npu_bench import Benchmark, Case
from torch import Tensor
from torch.nn import functional

EPS = 1e-6
DTYPE = torch.bfloat16
INDEX_BYTES = 8
LAYERS = 2  # of the model
LAYER_PARAMETERS = 8

Forward = Callable[..., Tensor]


@dataclass(frozen=True)
class Operators:
    """What the two implementations differ in.

    Attributes:
        embed: rows of a table [V, D] for tokens.
        norm: RMSNorm of x with a weight.
        add_norm: RMSNorm of x + residual, and that sum.
        mix: Attention Residuals over a list of blocks, with a query's and a norm's weight.
        loss: the mean cross entropy of x [T, D] @ head.T for targets [T].
    """

    embed: Callable[[Tensor, Tensor], Tensor]
    norm: Callable[[Tensor, Tensor], Tensor]
    add_norm: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    mix: Callable[[Sequence[Tensor], Tensor, Tensor], Tensor]
    loss: Callable[[Tensor, Tensor, Tensor], Tensor]


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    """As transformers' LlamaRMSNorm; statistics in fp32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


def plain_add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = residual + x
    return plain_norm(total, weight), total


def plain_mix(blocks: Sequence[Tensor], query: Tensor, rms_weight: Tensor) -> Tensor:
    v = torch.stack(tuple(blocks))
    wide = v.to(torch.promote_types(v.dtype, torch.float32))
    keys = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * rms_weight
    alpha = torch.softmax((keys * query).sum(-1, keepdim=True), 0)
    return (alpha * wide).sum(0).to(v.dtype)


def plain_loss(x: Tensor, head: Tensor, target: Tensor) -> Tensor:
    logits = functional.linear(x, head)
    return functional.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), target)


PLAIN = Operators(
    lambda tokens, table: functional.embedding(tokens, table), plain_norm, plain_add_norm, plain_mix, plain_loss
)
OURS = Operators(
    npu_embedding.embedding,
    lambda x, weight: npu_rms_norm.rms_norm(x, weight, EPS),
    lambda x, residual, weight: npu_rms_norm.add_rms_norm(x, residual, weight, EPS),
    lambda blocks, query, rms_weight: npu_attn_res.attn_res(list(blocks), query, rms_weight, rms_eps=EPS),
    npu_fused_linear_cross_entropy.fused_linear_cross_entropy,
)


def case(name: str, batch: int, tokens: int, width: int, heads: int, mlp: int, vocabulary: int = 0) -> Case:
    """A block, or, with a vocabulary, a model of `LAYERS` of them."""
    sizes = {"batch": batch, "tokens": tokens, "width": width, "heads": heads, "mlp": mlp, "vocabulary": vocabulary}
    return Case(name, sizes)


# The block of Llama 3.2 1B with as many heads for keys as for queries, a model of such blocks, and sizes for a CPU.
CASES = (
    case("block", 2, 2048, 2048, 32, 8192),
    case("model", 4, 2048, 2048, 32, 8192, 32000),
    case("small_block", 1, 64, 128, 4, 256),
    case("small_model", 1, 64, 128, 4, 256, 512),
)


def inputs(case: Case, device: torch.device) -> Mapping[str, Tensor]:
    batch, tokens, width, vocabulary = case["batch"], case["tokens"], case["width"], case["vocabulary"]

    def parameter(*shape: int) -> Tensor:
        return (torch.randn(shape, device=device) * shape[-1] ** -0.5).to(DTYPE).requires_grad_()

    def scale(size: int) -> Tensor:
        return (1 + 0.1 * torch.randn(size, device=device)).to(DTYPE).requires_grad_()

    found: dict[str, Tensor] = {}
    if vocabulary:
        found["tokens"] = torch.randint(0, vocabulary, (batch, tokens), device=device)
        found["target"] = torch.randint(0, vocabulary, (batch * tokens,), device=device)
        found["table"] = torch.randn(vocabulary, width, device=device).to(DTYPE).requires_grad_()
        found["head"] = parameter(vocabulary, width)
        found["queries"] = parameter(2 * LAYERS + 1, width)
        found["key_norm"] = scale(width)
        found["final_norm"] = scale(width)
    else:
        found["x"] = torch.randn(batch, tokens, width, device=device).to(DTYPE).requires_grad_()
    for layer in range(LAYERS if vocabulary else 1):
        found |= {
            f"attention_norm_{layer}": scale(width),
            f"qkv_{layer}": parameter(3 * width, width),
            f"q_norm_{layer}": scale(width // case["heads"]),
            f"k_norm_{layer}": scale(width // case["heads"]),
            f"out_{layer}": parameter(width, width),
            f"mlp_norm_{layer}": scale(width),
            f"gate_up_{layer}": parameter(2 * case["mlp"], width),
            f"down_{layer}": parameter(width, case["mlp"]),
        }
    return found


def attention(use: Operators, x: Tensor, qkv: Tensor, q_norm: Tensor, k_norm: Tensor, out: Tensor) -> Tensor:
    """Causal, with normalised queries and keys: views of one projection."""
    size = q_norm.shape[0]
    q, k, v = functional.linear(x, qkv).unflatten(-1, (3, -1, size)).unbind(-3)  # [B, T, heads, size]
    q, k, v = (heads.transpose(1, 2) for heads in (use.norm(q, q_norm), use.norm(k, k_norm), v))
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return functional.linear(y.transpose(1, 2).flatten(-2), out)


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = functional.linear(x, gate_up).chunk(2, dim=-1)
    return functional.linear(functional.silu(gate) * up, down)


def block(use: Operators, x: Tensor, *parameters: Tensor) -> Tensor:
    """A pre-norm block with a residual stream."""
    attention_norm, qkv, q_norm, k_norm, out, mlp_norm, gate_up, down = parameters
    y = attention(use, use.norm(x, attention_norm), qkv, q_norm, k_norm, out)
    y, residual = use.add_norm(y, x, mlp_norm)
    return residual + swiglu(y, gate_up, down)


def model(use: Operators, tokens: Tensor, target: Tensor, table: Tensor, head: Tensor, *parameters: Tensor) -> Tensor:
    """Embedding, `LAYERS` layers whose inputs are mixtures of all outputs so far (Full AttnRes), and the loss."""
    queries, key_norm, final_norm, *rest = parameters
    outputs = [use.embed(tokens, table)]

    def mixture() -> Tensor:
        return use.mix(outputs, queries[len(outputs) - 1], key_norm)

    for first in range(0, len(rest), LAYER_PARAMETERS):
        attention_norm, qkv, q_norm, k_norm, out, mlp_norm, gate_up, down = rest[first : first + LAYER_PARAMETERS]
        outputs.append(attention(use, use.norm(mixture(), attention_norm), qkv, q_norm, k_norm, out))
        outputs.append(swiglu(use.norm(mixture(), mlp_norm), gate_up, down))
    return use.loss(use.norm(mixture(), final_norm).flatten(0, 1), head, target)


def forward_of(use: Operators, is_model: bool) -> Forward:
    whole = model if is_model else block
    return lambda *tensors: whole(use, *tensors)


def reference(*tensors: Tensor) -> Tensor:
    return forward_of(PLAIN, not tensors[0].is_floating_point())(*tensors)


def provider(use: Operators, *, compiled: bool) -> Callable[[Case, torch.device], Forward]:
    def build(case: Case, device: torch.device) -> Forward:
        forward = forward_of(use, bool(case["vocabulary"]))
        if not compiled:
            return forward
        import torch._functorch.config as functorch

        torch._dynamo.reset()  # every case is compiled for its own shape; none counts against the limit of recompilations
        functorch.donated_buffer = False  # buffers given away by the first backward would forbid to retain the graph
        return torch.compile(forward, fullgraph=True, dynamic=False)

    return build


def weights(case: Case) -> int:
    """Elements of the matrices that tokens are multiplied with."""
    layer = case["width"] * (4 * case["width"] + 3 * case["mlp"])
    return LAYERS * layer + case["vocabulary"] * case["width"] if case["vocabulary"] else layer


def traffic(case: Case, mode: str) -> int:
    """Matrices once, and once more for their gradients; of activations only what the whole takes and gives."""
    rows = case["batch"] * case["tokens"]
    ends = rows * (2 * INDEX_BYTES if case["vocabulary"] else 2 * case["width"] * DTYPE.itemsize)
    return (2 if mode == "backward" else 1) * (weights(case) * DTYPE.itemsize + ends)


def flops(case: Case, mode: str) -> int:
    """Products with matrices, and causal attention; twice that backward."""
    rows = case["batch"] * case["tokens"]
    attentions = LAYERS if case["vocabulary"] else 1
    forward = 2 * rows * weights(case) + attentions * 2 * rows * case["tokens"] * case["width"]
    return 2 * forward if mode == "backward" else forward


def tolerance(case: Case) -> float:
    """Some dozen roundings to bf16 one after the other. A wrong element is off by about 1.

    In the gradient of a model's table the rows that no token names are zero: its rms, which errors are relative to, is
    several times below the size of an element.
    """
    return 2**-1 if case["vocabulary"] else 2**-3


BENCHMARK = Benchmark(
    name="block",
    distribution="npu-rms-norm",
    cases=CASES,
    inputs=inputs,
    providers={
        "ours_compiled": provider(OURS, compiled=True),
        "compiled": provider(PLAIN, compiled=True),
        "ours": provider(OURS, compiled=False),
        "plain": provider(PLAIN, compiled=False),
    },
    reference=reference,
    traffic=traffic,
    flops=flops,
    tolerance=tolerance,
    peers=("npu-embedding", "npu-attn-res", "npu-fused-linear-cross-entropy"),
    modes=("forward", "full"),
)
