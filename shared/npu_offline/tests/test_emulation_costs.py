"""What emulation costs: memory while a kernel runs, and what LLVM has to compile."""

import gc
import resource

import torch
from npu_offline import emulate
from sample_kernels import long_loop, rms_norm


def test_memory_is_bounded_in_a_long_loop():
    x, y = torch.randn(8192), torch.empty(8192)
    with emulate(threads=1):
        long_loop[(1,)](x, y, 2, BN=8192)
        gc.collect()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        long_loop[(1,)](x, y, 5000, BN=8192)
        long_loop[(500,)](x, y, 2, BN=8192)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    torch.testing.assert_close(y, torch.full((8192,), 2.0))
    assert after - before < 20_000  # KiB; one tile kept per iteration would be 160,000


def test_machine_code_does_not_grow_with_the_tile():
    """An unrolled loop over a tile takes LLVM seconds."""
    sizes = []
    for width in (8, 96):
        x, w = torch.randn(5, width), torch.randn(width)
        with emulate():
            compiled = rms_norm[(1,)](x, w, torch.empty_like(x), 5, 1e-6, D=width, BM=8)
        sizes.append(len(compiled.asm["npubin"]))
    assert sizes[1] < 1.1 * sizes[0]
