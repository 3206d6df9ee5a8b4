"""Calls of mojo_opset."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..measure import Case
from ..sources import mojo
from .entry import BF16, F32, Entry, collector, randn, rms_norm, rows_of, swiglu

ENTRIES: list[Entry] = []
_entry = collector("mojo", ENTRIES)


@_entry("rmsnorm forward", "2048 x 4096 bf16")
def _() -> Case:
    forward = mojo("rmsnorm").rmsnorm_fwd_impl
    return rms_norm(lambda x, w: forward(x, w, 1e-6, 0.0, 0)[0])


@_entry("swiglu forward", "2048 x 4096 bf16")
def _() -> Case:
    forward = mojo("swiglu").swiglu_fwd_impl
    return swiglu(lambda a, b: forward(a, b))


@_entry("gelu forward", "2048 x 4096 bf16")
def _() -> Case:
    forward = mojo("gelu").gelu_fwd_impl
    return Case(rows_of(1), lambda x: forward(x), lambda x: functional.gelu(x, approximate="tanh"))


@_entry("dynamic quantisation to int8", "2048 x 1024 bf16")
def _() -> Case:
    forward = mojo("quant").dynamic_quant_impl

    def reference(x: Tensor, smooth: Tensor) -> Tensor:
        return (x * smooth).abs().amax(-1, keepdim=True) / 127

    inputs = [randn(2048, 1024, dtype=BF16), torch.ones(1024)]
    minimum = 2 * 2048 * 1024 + 4 * 1024 + 2048 * 1024 + 4 * 2048
    return Case(inputs, lambda x, smooth: forward(x, smooth)[1], reference, minimum)


@_entry("sdpa inference, causal", "1 x 2 x 512 x 64 bf16")
def _() -> Case:
    forward = mojo("sdpa").sdpa_infer_impl
    inputs = [*(randn(1, 2, 512, 64, dtype=BF16, seed=i) for i in range(3)), torch.ones(512, 512).tril().bool()]
    return Case(
        inputs,
        lambda q, k, v, mask: forward(q, k, v, mask, 0.125),
        lambda q, k, v, mask: functional.scaled_dot_product_attention(q, k, v, mask, scale=0.125),
    )


@_entry("int8 matrix product, dequantised", "256 x 512 x 256 int8")
def _() -> Case:
    kernels = mojo("int8_gemm")
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-128, 128, shape, generator=generator).to(torch.int8) for shape in ((256, 512), (512, 256)))
    row, column = torch.rand(256, generator=generator), torch.rand(256, generator=generator)

    def call(a: Tensor, b: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return kernels.int8_gemm_dequant_impl(a, kernels.prepare_b_impl(b), row, column, None, 256, 256, F32)

    def reference(a: Tensor, b: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return (a.double() @ b.double()) * row[:, None] * column[None, :]

    return Case([a, b, row, column], call, reference)
