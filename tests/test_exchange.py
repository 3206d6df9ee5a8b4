"""Programs that wait for one another end where other kernels leave them a few multiprocessors of a GPU."""

import time

import pytest
import torch
import triton
import triton.language as tl
from npu_attn_res import attn_res
from npu_rms_norm import rms_norm

FREE = 4  # multiprocessors


@triton.jit
def park_kernel(p_flag):
    """Stays until the flag is not 0."""
    while tl.atomic_add(p_flag, 0) == 0:
        pass


def rows(*shape):
    return torch.randn(shape, device="cuda").bfloat16().requires_grad_()


def norms():
    x, weight = rows(256, 32768), rows(32768)
    return rms_norm(x, weight), [x, weight]


def layers():
    blocks, query, weight = [rows(512, 5120) for _ in range(12)], rows(5120), rows(5120)
    return attn_res(blocks, query, weight), [*blocks, query, weight]


@pytest.mark.uncollected("programs share rows on CUDA alone", lambda place: place != "cuda")
@pytest.mark.parametrize("call", [norms, layers])
def test_shared_rows_end_beside_parked_programs(device, call):
    torch.manual_seed(0)
    result, leaves = call()
    upstream = torch.randn_like(result)
    expected = torch.autograd.grad(result, leaves, upstream, retain_graph=True)
    flag, one = (torch.full((1,), value, dtype=torch.int32, device="cuda") for value in (0, 1))
    parked, release = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    with torch.cuda.stream(parked):
        park_kernel[(2 * (processors - FREE),)](flag, num_warps=32)  # two fill the threads of a multiprocessor
    time.sleep(0.1)
    try:
        gradients = torch.autograd.grad(result, leaves, upstream)
        ended = torch.cuda.Event()
        ended.record()
        deadline = time.monotonic() + 20
        while not ended.query() and time.monotonic() < deadline:
            time.sleep(0.01)
        waits = not ended.query()
    finally:
        with torch.cuda.stream(release):
            flag.copy_(one)
        torch.cuda.synchronize()
    assert not waits, "the backward did not end while other programs were parked"
    assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))
