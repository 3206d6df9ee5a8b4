"""For tests of tapes: a stand-in for a kernel, and calls that are recorded and compared with themselves."""

import ctypes

import torch
from npu_tiling.launching import listening
from npu_tiling.launching.direct import DirectCall
from npu_tiling.pytorch.repetition import Repetition
from npu_tiling.pytorch.tape import record


class Watching:
    """A stand-in for `Watchers`."""

    def __init__(self):
        self.hooks = []

    def __bool__(self):
        return bool(self.hooks)


class Doubling:
    """A stand-in for a kernel that is called without the JIT: y = 2 x, of contiguous fp32 tensors."""

    def __init__(self):
        self.launches, self.watchers = 0, Watching()

    def run(self, grid, _, __, stream, handle, x, y, count, rest):
        assert (grid, stream, handle, rest) == (7, "the stream", "handle", "rest")
        self.launches += 1
        source, to = ((ctypes.c_float * count).from_address(tensor.data_ptr()) for tensor in (x, y))
        to[:] = [2 * each for each in source]

    def launch(self, x, y):
        call = DirectCall(self.run, lambda index: "the stream", ("handle",), ("rest",))
        call.launch(0, 7, (x, y), (x.numel(),))
        if listening.here.listener is not None:
            listening.here.listener.launched(call, 7, (x, y), (x.numel(),), self.watchers)


def repeated(run, *shapes, times=3):
    """Compares a recorded call with the call itself for other tensors; returns its tape."""
    given = [torch.randn(shape) for shape in shapes]
    found, again = record(run, given, given)
    torch.testing.assert_close(found, run(*given), rtol=0, atol=0)
    for _ in range(times if isinstance(again, Repetition) else 0):
        given = [torch.randn(shape) for shape in shapes]
        torch.testing.assert_close(again(given), run(*given), rtol=0, atol=0)
    return again
