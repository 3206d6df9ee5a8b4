"""The calls in the gallery: sizes, inputs, whom to call, and what PyTorch computes in fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from .measure import Case
from .sources import fla, liger, mojo, tutorial

_BF16, _F16, _F32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Entry:
    """One row.

    Attributes:
        source: a key of `sources.TITLES`.
        name: of the operator.
        sizes: of its tensors.
        make: loads the kernels and makes the inputs.
    """

    source: str
    name: str
    sizes: str
    make: Callable[[], Case]


ENTRIES: list[Entry] = []


def _entry(source: str, name: str, sizes: str) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    def add(make: Callable[[], Case]) -> Callable[[], Case]:
        ENTRIES.append(Entry(source, name, sizes, make))
        return make

    return add


def _randn(*shape: int, dtype: torch.dtype = _F32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _rms(x: Tensor, w: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], w, 1e-6)


def _layer_norm(x: Tensor, w: Tensor, b: Tensor, eps: float = 1e-5) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], w, b, eps)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


@_entry("liger", "rms_norm forward", "2048 x 4096 bf16")
def _() -> Case:
    apply = liger("rms_norm").LigerRMSNormFunction.apply
    inputs = [_randn(2048, 4096, dtype=_BF16), _randn(4096, dtype=_BF16, seed=1)]
    return Case(inputs, lambda x, w: apply(x, w, 1e-6, 0.0, "llama", False), _rms)


@_entry("liger", "layer_norm forward", "2048 x 4096 bf16")
def _() -> Case:
    forward = liger("layer_norm").layer_norm_forward
    inputs = [_randn(2048, 4096, dtype=_BF16), *(_randn(4096, dtype=_BF16, seed=i) for i in (1, 2))]
    return Case(
        inputs, lambda x, w, b: forward(x, w, b, 1e-6)[0], lambda x, w, b: functional.layer_norm(x, (4096,), w, b, 1e-6)
    )


@_entry("liger", "softmax forward", "2048 x 4096 bf16")
def _() -> Case:
    apply = liger("softmax").LigerSoftmaxFunction.apply
    return Case([_randn(2048, 4096, dtype=_BF16)], apply, lambda x: x.softmax(-1))


@_entry("liger", "swiglu forward", "2048 x 4096 bf16")
def _() -> Case:
    forward = liger("swiglu").swiglu_forward
    inputs = [_randn(2048, 4096, dtype=_BF16, seed=i) for i in (0, 1)]
    return Case(inputs, lambda a, b: forward(a, b), lambda a, b: functional.silu(a) * b)


@_entry("liger", "geglu forward", "2048 x 4096 bf16")
def _() -> Case:
    forward = liger("geglu").geglu_forward
    inputs = [_randn(2048, 4096, dtype=_BF16, seed=i) for i in (0, 1)]
    return Case(inputs, lambda a, b: forward(a, b), lambda a, b: functional.gelu(a, approximate="tanh") * b)


@_entry("liger", "rms_norm backward", "2048 x 2048 bf16")
def _() -> Case:
    apply = liger("rms_norm").LigerRMSNormFunction.apply

    def gradients(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        def call(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
            x, w = x.detach().requires_grad_(True), w.detach().requires_grad_(True)
            return torch.autograd.grad(function(x, w), (x, w), dy)

        return call

    inputs = [_randn(2048, 2048, dtype=_BF16), _randn(2048, dtype=_BF16, seed=1), _randn(2048, 2048, dtype=_BF16, seed=2)]
    minimum = 2 * (2 * 2048 * 2048 + 2048) + sum(2 * t.numel() for t in inputs)  # with the forward, which runs before it
    forward = gradients(lambda x, w: apply(x, w, 1e-6, 0.0, "llama", False))
    return Case(inputs, forward, gradients(_rms), minimum + 2 * 2048 * 2048)


@_entry("liger", "embedding forward", "16384 of 32000 x 768 fp32")
def _() -> Case:
    forward = liger("embedding").embedding_forward
    index = torch.randint(32000, (16384,), generator=torch.Generator().manual_seed(0))
    return Case(
        [_randn(32000, 768), index],
        lambda table, index: forward(table, index),
        lambda table, index: table[index],
        minimum=4 * 2 * 16384 * 768 + 8 * 16384,
    )


@_entry("liger", "rope forward, q and k", "2 x 16 x 512 x 128 fp32")
def _() -> Case:
    apply = liger("rope").LigerRopeFunction.apply
    angle = _randn(1, 512, 64, seed=2)
    cos, sin = (torch.cat([f(angle)] * 2, -1) for f in (torch.cos, torch.sin))
    q, k = (_randn(2, 16, 512, 128, seed=i) for i in (0, 1))

    def reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        half = (cos[:, None, :, :64], sin[:, None, :, :64])
        return _rotated(q, *half), _rotated(k, *half)

    return Case([q, k, cos, sin], lambda *given: apply(*given), reference)


@_entry("liger", "cross_entropy, loss and gradient", "512 x 32000 bf16")
def _() -> Case:
    forward = liger("cross_entropy").LigerCrossEntropyFunction
    logits, target = _randn(512, 32000, dtype=_BF16), torch.arange(512) * 61

    def call(logits: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        logits.requires_grad_(True)
        loss = forward.apply(logits, target, None)[0]
        loss.backward()
        return loss.detach(), logits.grad

    def reference(logits: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        logits = logits.detach().requires_grad_(True)
        loss = functional.cross_entropy(logits, target)
        loss.backward()
        return loss.detach(), logits.grad

    return Case([logits, target], call, reference)


@_entry("liger", "group_norm forward", "8 x 64 x 1024 fp32, 8 groups")
def _() -> Case:
    forward = liger("group_norm").group_norm_forward
    inputs = [_randn(8, 64, 1024), _randn(64, seed=1), _randn(64, seed=2)]
    return Case(
        inputs,
        lambda x, w, b: forward(x, 64, 8, w, b, 1e-6)[0].view(8, 64, 1024),
        lambda x, w, b: functional.group_norm(x, 8, w, b, 1e-6),
    )


@_entry("liger", "sparsemax forward", "256 x 1000 fp32")
def _() -> Case:
    apply = liger("sparsemax").LigerSparsemaxFunction.apply

    def reference(x: Tensor) -> Tensor:
        ordered = x.sort(-1, descending=True).values
        rank = torch.arange(1, 1001, dtype=x.dtype)
        support = (1 + rank * ordered > ordered.cumsum(-1)).sum(-1, keepdim=True)
        tau = (ordered.cumsum(-1).gather(-1, support - 1) - 1) / support
        return (x - tau).clamp(min=0)

    return Case([_randn(256, 1000)], lambda x: apply(x, -1), reference)


@_entry("fla", "l2norm forward", "4096 x 128 bf16")
def _() -> Case:
    forward = fla("modules.norm.triton_ascend.l2norm").l2norm_fwd_npu
    inputs = [_randn(4096, 128, dtype=_BF16)]
    return Case(inputs, lambda x: forward(x)[0], lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt())


@_entry("fla", "layer_norm forward", "2048 x 4096 bf16")
def _() -> Case:
    forward = fla("modules.norm.triton_ascend.layernorm").layer_norm_fwd_npu
    inputs = [_randn(2048, 4096, dtype=_BF16), *(_randn(4096, dtype=_BF16, seed=i) for i in (1, 2))]
    return Case(inputs, lambda *given: forward(*given)[0], _layer_norm)


@_entry("fla", "swiglu forward", "2048 x 4096 bf16")
def _() -> Case:
    forward = fla("modules.activations.triton_ascend").swiglu_fwd_npu
    inputs = [_randn(2048, 4096, dtype=_BF16, seed=i) for i in (0, 1)]
    return Case(inputs, lambda x, y: forward(x, y), lambda x, y: functional.silu(x) * y)


@_entry("fla", "rotary forward", "2 x 512 x 16 x 128 bf16")
def _() -> Case:
    forward = fla("modules.rotary.triton_ascend").rotary_embedding_fwdbwd_npu
    angle = _randn(512, 64, seed=2)
    inputs = [_randn(2, 512, 16, 128, dtype=_BF16), angle.cos().to(_BF16), angle.sin().to(_BF16)]
    return Case(
        inputs, lambda *given: forward(*given), lambda x, cos, sin: _rotated(x, cos[None, :, None], sin[None, :, None])
    )


@_entry("fla", "cumsum within chunks of 64", "2 x 1024 x 16 fp32")
def _() -> Case:
    forward = fla("ops.utils.triton_ascend.cumsum").chunk_local_cumsum_scalar_npu
    return Case(
        [_randn(2, 1024, 16)],
        lambda g: forward(g, 64),
        lambda g: g.view(2, 16, 64, 16).cumsum(2).reshape(g.shape),
    )


@_entry("fla", "solve_tril, inverses of 64 x 64", "1 x 512 x 4 x 64 fp32")
def _() -> Case:
    forward = fla("ops.utils.triton_ascend.solve_tril").solve_tril_npu
    strict = torch.ones(64, 64).tril(-1)
    a = 0.1 * _randn(1, 8, 4, 64, 64) * strict

    def reference(given: Tensor) -> Tensor:
        blocks = given.view(1, 8, 64, 4, 64).transpose(2, 3)
        found = torch.linalg.inv(torch.eye(64, dtype=given.dtype) + blocks)
        return found.transpose(2, 3).reshape(given.shape)

    return Case([a.transpose(2, 3).reshape(1, 512, 4, 64).contiguous()], lambda a: forward(a), reference)


@_entry("fla", "chunk_fwd_h, states of linear attention", "1 x 512 x 4 x 64 bf16")
def _() -> Case:
    forward = fla("ops.common.backends.triton_ascend.chunk_h").chunk_fwd_h_npu

    def reference(k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.view(1, 8, 64, 4, 64) for t in (k, v))
        after = torch.einsum("bnchk,bnchv->bnhkv", k, v).cumsum(1)
        return torch.cat([torch.zeros_like(after[:, :1]), after[:, :-1]], 1)

    inputs = [_randn(1, 512, 4, 64, dtype=_BF16, seed=i) for i in (0, 1)]
    return Case(inputs, lambda k, v: forward(k, v)[0], reference)


@_entry("fla", "chunk_scaled_dot_kkt", "1 x 512 x 4 x 64 bf16")
def _() -> Case:
    forward = fla("ops.common.backends.triton_ascend.chunk_scaled_dot_kkt").chunk_scaled_dot_kkt_fwd_npu

    def reference(k: Tensor, beta: Tensor) -> Tensor:
        k, beta = k.view(1, 8, 64, 4, 64), beta.view(1, 8, 64, 4)
        found = torch.einsum("bnchk,bndhk->bnchd", k * beta[..., None], k)
        return (found * torch.ones(64, 64).tril(-1)[None, None, :, None]).reshape(1, 512, 4, 64)

    inputs = [_randn(1, 512, 4, 64, dtype=_BF16), _randn(1, 512, 4, dtype=_BF16, seed=1)]
    return Case(inputs, lambda k, beta: forward(k, beta=beta), reference)


@_entry("fla", "fused_cross_entropy forward", "512 x 32000 bf16")
def _() -> Case:
    forward = fla("modules.fused_cross_entropy.triton_ascend").fused_cross_entropy_forward_npu
    return Case(
        [_randn(512, 32000, dtype=_BF16), torch.arange(512) * 61],
        lambda logits, target: forward(logits, target)[0],
        lambda logits, target: functional.cross_entropy(logits, target, reduction="none"),
    )


@_entry("tutorials", "01 vector add", "98432 fp32")
def _() -> Case:
    add = tutorial("01-vector-add").add
    return Case([_randn(98432), _randn(98432, seed=1)], lambda x, y: add(x, y), lambda x, y: x + y)


@_entry("tutorials", "02 fused softmax", "1823 x 781 fp32")
def _() -> Case:
    softmax = tutorial("02-fused-softmax").softmax
    return Case([_randn(1823, 781)], lambda x: softmax(x, None), lambda x: x.softmax(-1))


@_entry("tutorials", "03 layer norm", "1151 x 8192 fp16")
def _() -> Case:
    layer_norm = tutorial("03-layer-norm").layer_norm
    inputs = [_randn(1151, 8192, dtype=_F16), *(_randn(8192, dtype=_F16, seed=i) for i in (1, 2))]
    return Case(
        inputs,
        lambda x, w, b: layer_norm(x, (8192,), w, b, 1e-5),
        _layer_norm,
    )


@_entry("tutorials", "04 fused attention", "1 x 2 x 512 x 64 fp16")
def _() -> Case:
    apply = tutorial("04-fused-attention")._attention.apply
    inputs = [_randn(1, 2, 512, 64, dtype=_F16, seed=i) for i in range(3)]
    return Case(
        inputs,
        lambda q, k, v: apply(q, k, v, False, 0.5, 64, 64),
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, scale=0.5),
    )


@_entry("tutorials", "05 matrix multiplication", "512 x 512 x 512 fp16")
def _() -> Case:
    matmul = tutorial("05-matrix-multiplication").matmul
    inputs = [_randn(512, 512, dtype=_F16, seed=i) for i in (0, 1)]
    return Case(inputs, lambda a, b: matmul(a, b), lambda a, b: a @ b)


@_entry("tutorials", "09 gather of rows", "4096 of 10000 x 256 fp32")
def _() -> Case:
    gather = tutorial("09-gather").triton_gather
    index = torch.randint(10000, (4096,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    return Case(
        [_randn(10000, 256), index],
        lambda table, index: gather(table, index),
        lambda table, index: table[index.long()],
        minimum=4 * (2 * 4096 * 256 + 4096),
    )


@_entry("tutorials", "13 matrix multiplication, optimised", "512 x 512 x 512 bf16")
def _() -> Case:
    matmul = tutorial("13-matrix-multiplication-optimized").triton_matmul
    inputs = [_randn(512, 512, dtype=_BF16, seed=i) for i in (0, 1)]
    return Case(inputs, lambda a, b: matmul(a, b), lambda a, b: a @ b)


@_entry("mojo", "rmsnorm forward", "2048 x 4096 bf16")
def _() -> Case:
    forward = mojo("rmsnorm").rmsnorm_fwd_impl
    inputs = [_randn(2048, 4096, dtype=_BF16), _randn(4096, dtype=_BF16, seed=1)]
    return Case(inputs, lambda x, w: forward(x, w, 1e-6, 0.0, 0)[0], _rms)


@_entry("mojo", "swiglu forward", "2048 x 4096 bf16")
def _() -> Case:
    forward = mojo("swiglu").swiglu_fwd_impl
    inputs = [_randn(2048, 4096, dtype=_BF16, seed=i) for i in (0, 1)]
    return Case(inputs, lambda a, b: forward(a, b), lambda a, b: functional.silu(a) * b)


@_entry("mojo", "gelu forward", "2048 x 4096 bf16")
def _() -> Case:
    forward = mojo("gelu").gelu_fwd_impl
    return Case([_randn(2048, 4096, dtype=_BF16)], lambda x: forward(x), lambda x: functional.gelu(x, approximate="tanh"))


@_entry("mojo", "dynamic quantisation to int8", "2048 x 1024 bf16")
def _() -> Case:
    forward = mojo("quant").dynamic_quant_impl

    def reference(x: Tensor, smooth: Tensor) -> Tensor:
        return (x * smooth).abs().amax(-1, keepdim=True) / 127

    inputs = [_randn(2048, 1024, dtype=_BF16), torch.ones(1024)]
    minimum = 2 * 2048 * 1024 + 4 * 1024 + 2048 * 1024 + 4 * 2048
    return Case(inputs, lambda x, smooth: forward(x, smooth)[1], reference, minimum)


@_entry("mojo", "sdpa inference, causal", "1 x 2 x 512 x 64 bf16")
def _() -> Case:
    forward = mojo("sdpa").sdpa_infer_impl
    inputs = [*(_randn(1, 2, 512, 64, dtype=_BF16, seed=i) for i in range(3)), torch.ones(512, 512).tril().bool()]
    return Case(
        inputs,
        lambda q, k, v, mask: forward(q, k, v, mask, 0.125),
        lambda q, k, v, mask: functional.scaled_dot_product_attention(q, k, v, mask, scale=0.125),
    )


@_entry("mojo", "int8 matrix product, dequantised", "256 x 512 x 256 int8")
def _() -> Case:
    kernels = mojo("int8_gemm")
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-128, 128, shape, generator=generator).to(torch.int8) for shape in ((256, 512), (512, 256)))
    row, column = torch.rand(256, generator=generator), torch.rand(256, generator=generator)

    def call(a: Tensor, b: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return kernels.int8_gemm_dequant_impl(a, kernels.prepare_b_impl(b), row, column, None, 256, 256, _F32)

    def reference(a: Tensor, b: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return (a.double() @ b.double()) * row[:, None] * column[None, :]

    return Case([a, b, row, column], call, reference)
