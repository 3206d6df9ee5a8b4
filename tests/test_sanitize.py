"""What runs under compute-sanitizer on a CUDA machine is every kernel, and what it prints is read right."""

import re
from unittest import mock

import npu_tiling
import pytest
import torch
from npu_rms_norm import rms_norm
from npu_tiling import Kernels

from tools import architecture, launches
from tools.sanitize.__main__ import QUICK
from tools.sanitize.calls import CALLS
from tools.sanitize.output import read
from tools.sanitize.part import run
from tools.sanitize.written import MarkWritten
from tools.workspace import ROOT

H200 = npu_tiling.GPUS["H200"]
SAID = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at forward_kernel+0x2f0 in kernels.py:176
=========     by thread (1,0,0) in block (0,0,0)
=========     Address 0x7f0000000000 is out of bounds
=========         Host Frame: launch [0x1234] in driver.so
=========
========= Invalid __global__ read of size 4 bytes
=========     at forward_kernel+0x2f0 in kernels.py:176
=========     by thread (2,0,0) in block (0,0,0)
=========
========= Error: Race reported between Write access at sum_runs_kernel+0x10 in kernels_backward.py:9
=========     and Read access at sum_runs_kernel+0x20 in kernels_backward.py:10 [4 hazards]
=========
========= Uninitialized __global__ memory read of size 2 bytes
=========     at void at::native::vectorized_elementwise_kernel<(int)4, at::native::Add>(int, T2)+0x110
=========     by thread (0,0,0) in block (0,0,0)
=========
not a line of the tool
========= ERROR SUMMARY: 4 errors
"""


@pytest.mark.parametrize("package", CALLS)
def test_every_kernel_is_launched(package):
    """On CUDA, or on Ascend alone."""
    launched = {
        kind: {launch.kernel for _, made in launches.of_package(package, chip) for launch in made}
        for kind, chip in architecture.CHIPS.items()
    }
    sources = "".join(file.read_text() for file in (ROOT / "packages" / package / "src").rglob("*.py"))
    kernels = set(re.findall(r"^def (\w+_kernel)\(", sources, re.MULTILINE))
    assert kernels, "no kernels found in the sources"
    assert launched["cuda"] and kernels <= launched["ascend"] | launched["cuda"]


def test_findings_are_told_apart_by_kernel():
    found = read(SAID)
    assert found.ours == {
        "forward_kernel: Invalid __global__ read of size 4 bytes": 2,
        "sum_runs_kernel: Error: Race reported between Write access at sum_runs_kernel+ADDRESS in kernels_backward.py:9"
        " and Read access at sum_runs_kernel+ADDRESS in kernels_backward.py:10 [4 hazards]": 1,
    }
    assert found.others == {
        "void at::native::vectorized_elementwise_kernel: Uninitialized __global__ memory read of size 2 bytes": 1
    }
    assert found.summaries == ["4 errors"]


def test_a_run_that_broke_off_has_no_summary():
    assert read(SAID.rpartition("=========")[0]).summaries == []


class Noted(MarkWritten):
    """MarkWritten that say which addresses they wrote."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.addresses = set()

    def mark(self, tensor):
        super().mark(tensor)
        step = tensor.element_size()
        self.addresses |= {tensor.data_ptr() + step * place for place in range(tensor.numel())} if tensor.numel() else set()

    def has(self, tensor):
        return {tensor.data_ptr() + tensor.element_size() * place for place in range(tensor.numel())} <= self.addresses


def test_what_pytorch_writes_is_marked_and_what_it_only_allocates_is_not():
    with Noted() as noted:
        allocated = [torch.empty(5), torch.empty_like(torch.empty(5)), torch.empty(7)[:3]]
        written, part = torch.ones(5), torch.empty(2, 5)
        part[1].fill_(2)
        torch.add(written, 1, out=(sums := torch.empty(5)))
        written.requires_grad_()
        (grad,) = torch.autograd.grad((written * 3).sum(), written)
    assert not any(noted.has(tensor) for tensor in (*allocated, part[0]))
    assert all(noted.has(tensor) for tensor in (written, part[1], sums, grad))
    assert torch.equal(grad, torch.full((5,), 3.0)) and torch.equal(sums, torch.full((5,), 2.0))


def test_operators_of_ours_are_seen_through():
    """What they allocate for a kernel stays unwritten, unless the kernel writes it."""
    x = torch.randn(3, 64, dtype=torch.float32)
    with (
        mock.patch.object(Kernels, "launch"),
        npu_tiling.use_device(H200, emulated=True),
        Noted() as noted,
    ):
        y = rms_norm(x, x[0])
    assert not noted.has(y)
    with Noted() as noted:
        y = rms_norm(x, x[0])
    assert noted.has(y)


def test_a_copy_made_inside_of_an_operator_is_marked():
    """There PyTorch's dispatcher calls `contiguous` itself, which returns what may be a view."""
    x, weight = torch.randn(3, 64), torch.randn(128)[::2]
    given = []

    def launch(self, module, kernel, spec, grid, tensors, scalars):
        given.extend(tensor for tensor in tensors if tensor is not None and tensor.shape == weight.shape)

    with (
        mock.patch.object(Kernels, "launch", launch),
        npu_tiling.use_device(H200, emulated=True),
        Noted() as noted,
    ):
        rms_norm(x, weight)
    assert given and given[0].is_contiguous() and all(noted.has(tensor) for tensor in given)


def test_a_quick_run_takes_calls_of_every_part():
    def label(number):
        return lambda: ran.append(number)

    for every in (1, QUICK):
        ran = []
        calls = {"some": lambda device: ((str(i), label(i)) for i in range(50))}
        with mock.patch.dict(CALLS, calls):
            told = [run("some", part, 3, torch.device("cpu"), every) for part in range(3)]
        assert sorted(ran) == list(range(0, 50, every))
        assert max(each["calls"] for each in told) - min(each["calls"] for each in told) <= 1
