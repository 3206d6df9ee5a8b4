"""Calls of triton-ascend's tutorials."""

from __future__ import annotations

import torch
from torch.nn import functional

from ..measure import Case
from ..sources import tutorial
from .entry import BF16, F16, Entry, collector, layer_norm, randn

ENTRIES: list[Entry] = []
_entry = collector("tutorials", ENTRIES)


@_entry("01 vector add", "98432 fp32")
def _() -> Case:
    add = tutorial("01-vector-add").add
    return Case([randn(98432), randn(98432, seed=1)], lambda x, y: add(x, y), lambda x, y: x + y)


@_entry("02 fused softmax", "1823 x 781 fp32")
def _() -> Case:
    softmax = tutorial("02-fused-softmax").softmax
    return Case([randn(1823, 781)], lambda x: softmax(x, None), lambda x: x.softmax(-1))


@_entry("03 layer norm", "1151 x 8192 fp16")
def _() -> Case:
    forward = tutorial("03-layer-norm").layer_norm
    return layer_norm(lambda x, w, b: forward(x, (8192,), w, b, 1e-5), 1151, 8192, F16)


@_entry("04 fused attention", "1 x 2 x 512 x 64 fp16")
def _() -> Case:
    apply = tutorial("04-fused-attention")._attention.apply
    inputs = [randn(1, 2, 512, 64, dtype=F16, seed=i) for i in range(3)]
    return Case(
        inputs,
        lambda q, k, v: apply(q, k, v, False, 0.5, 64, 64),
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, scale=0.5),
    )


@_entry("05 matrix multiplication", "512 x 512 x 512 fp16")
def _() -> Case:
    matmul = tutorial("05-matrix-multiplication").matmul
    inputs = [randn(512, 512, dtype=F16, seed=i) for i in (0, 1)]
    return Case(inputs, lambda a, b: matmul(a, b), lambda a, b: a @ b)


@_entry("09 gather of rows", "4096 of 10000 x 256 fp32")
def _() -> Case:
    gather = tutorial("09-gather").triton_gather
    index = torch.randint(10000, (4096,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    return Case(
        [randn(10000, 256), index],
        lambda table, index: gather(table, index),
        lambda table, index: table[index.long()],
        minimum=4 * (2 * 4096 * 256 + 4096),
    )


@_entry("13 matrix multiplication, optimised", "512 x 512 x 512 bf16")
def _() -> Case:
    matmul = tutorial("13-matrix-multiplication-optimized").triton_matmul
    inputs = [randn(512, 512, dtype=BF16, seed=i) for i in (0, 1)]
    return Case(inputs, lambda a, b: matmul(a, b), lambda a, b: a @ b)
