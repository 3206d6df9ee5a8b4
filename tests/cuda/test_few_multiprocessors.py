"""Operators in a green context: CUDA runs their programs on a few multiprocessors of a GPU, which reports all of them."""

import contextlib
import dataclasses

import npu_tiling
import pytest
import torch
import triton
import triton.language as tl
from marks import cuda
from npu_attn_res import attn_res
from npu_embedding import embedding
from npu_fused_linear_cross_entropy import fused_linear_cross_entropy
from npu_rms_norm import rms_norm

FEW = 16  # CUDA gives them in eights
INDICES, TARGET = torch.arange(70_000) * 7 % 3001, torch.arange(1027)
CALLS = {
    "rms_norm": (rms_norm, [(1027, 4096), (4096,)]),
    "rms_norm, wide": (rms_norm, [(67, 70_000), (70_000,)]),
    "attn_res": (lambda q, w, v: attn_res(v, q, w), [(4096,), (4096,), (8, 1027, 4096)]),
    "attn_res, a list": (lambda q, w, *blocks: attn_res(blocks, q, w), [(5120,), (5120,), *[(1027, 5120)] * 12]),
    "embedding": (lambda table: embedding(INDICES.cuda(), table), [(3001, 512)]),
    "cross entropy": (lambda x, w: fused_linear_cross_entropy(x, w, TARGET.cuda()), [(1027, 512), (32_000, 512)]),
}


@triton.jit
def where_kernel(p_out):
    place = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(p_out + tl.program_id(0), place)


@contextlib.contextmanager
def few_multiprocessors():
    contexts = pytest.importorskip("torch.cuda.green_contexts", reason="this PyTorch has no green contexts")
    context = contexts.GreenContext.create(FEW, 0)
    context.set_context()
    try:
        yield
        torch.cuda.synchronize()
    finally:
        context.pop_context()


def run(call, leaves):
    with torch.autograd.set_multithreading_enabled(False):  # another thread would have the whole GPU
        result = call(*leaves)
        upstream = torch.linspace(-1, 1, result.numel(), device="cuda").view(result.shape).to(result.dtype)
        return [result.detach(), *torch.autograd.grad(result, leaves, upstream if result.dim() else None)]


@cuda
def test_programs_run_on_a_few_multiprocessors():
    places = torch.empty(10_000, dtype=torch.int32, device="cuda")
    where_kernel[(10_000,)](places)
    every = places.unique().numel()
    with few_multiprocessors():
        where_kernel[(10_000,)](places)
    assert places.unique().numel() <= FEW < every


@cuda
@pytest.mark.parametrize("told", [False, True], ids=["told all", "told few"])
@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_of_the_whole(name, told):
    call, shapes = CALLS[name]
    torch.manual_seed(0)
    leaves = [torch.randn(shape, device="cuda").bfloat16().requires_grad_() for shape in shapes]
    chip = npu_tiling.device_for(leaves[0].device)
    with npu_tiling.use_device(dataclasses.replace(chip, vector_cores=FEW, cube_cores=FEW) if told else chip):
        expected = run(call, leaves)
        torch.cuda.synchronize()
        with few_multiprocessors():
            found = run(call, leaves)
    assert all(map(torch.equal, found, expected))
