import sys
from types import ModuleType

import pytest
import torch
from npu_bench import BenchError, open_device
from npu_bench.devices import default_kind
from npu_bench.timing import host_times


class _Torch(ModuleType):
    """torch with an NPU whose tensors are the CPU's."""

    def __init__(self, backend):
        super().__init__("torch")
        self.npu = backend

    def __getattr__(self, name):
        return getattr(torch, name)

    @staticmethod
    def device(*names):
        assert names == ("npu", 0)
        return torch.device("cpu")


@pytest.fixture
def torch_npu(monkeypatch, backend):
    """torch_npu and the torch.npu that it adds."""
    monkeypatch.delenv("NPU_OFFLINE_CANN_RUNTIME", raising=False)  # where these tests run over the stand-in of CANN
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    monkeypatch.setattr("npu_bench.devices.torch", _Torch(backend))
    return backend


def test_npu_is_found_timed_by_its_events_and_counted_by_its_statistics(torch_npu):
    assert default_kind() == "npu"
    device = open_device("npu")
    assert (device.kind, device.name, device.reference_dtype) == ("npu", "Ascend910B4", torch.float32)
    assert device.elapsed_ms(device.stamp(), device.stamp()) == 2.5
    assert device.peak() - device.allocated() == 3 * 2**20


def test_missing_npu_is_one_sentence(torch_npu, monkeypatch):
    torch_npu.is_available = lambda: False
    with pytest.raises(BenchError, match="torch_npu finds no NPU"):
        open_device("npu")
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(BenchError, match="torch_npu cannot be imported"):
        open_device("npu")


def test_host_times_are_taken_in_turns(cpu):
    order = []
    calls = {name: lambda n=name: order.append(n) for name in "ab"}
    times = host_times(calls, cpu, budget_s=60)  # as many of each as there may be
    timed = "".join(order[-4 * 8 :])
    assert timed == "aaaaaaaabbbbbbbb" * 2
    assert all(time.samples >= 10 for time in times.values())
