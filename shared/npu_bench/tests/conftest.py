"""A toy operator, y = x * weight, with peers that are right, wrong and broken; devices that cost no time."""

import contextlib
import time
from types import SimpleNamespace

import pytest
import torch
from npu_bench import Accelerator, Benchmark, Case, Cpu, Sweep, UnavailableError
from npu_bench.devices import MIB
from npu_bench.environment import Environment
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

EVENT_MS = 2.5
PEAK_MIB = 3


def inputs(case, device):
    x = torch.randn(case["rows"], case["width"], dtype=torch.bfloat16, device=device).requires_grad_()
    return {"x": x, "weight": torch.randn(case["width"], dtype=torch.bfloat16, device=device).requires_grad_()}


def product(x, weight):
    return x * weight


def one_wrong_row(x, weight):
    y = x * weight
    return torch.cat([y[:-1], y[-1:] + 1])


def not_a_number(x, weight):
    return (x * weight).masked_fill(torch.arange(x.shape[1]) == 1, torch.nan)


def wrong_gradient(x, weight):
    return x * weight.detach() + 0 * weight


def no_gradient(x, weight):
    return x * weight.detach()


def overwrites_its_input(x, weight):
    y = x * weight
    x.data.zero_()
    return y


def raises(x, weight):
    raise RuntimeError("does not compile\nand more")


FORWARDS = {
    function.__name__: function
    for function in (
        *(product, one_wrong_row, not_a_number, wrong_gradient),
        *(no_gradient, overwrites_its_input, raises),
    )
}


def missing(case, device):
    raise UnavailableError("is not installed")


@pytest.fixture
def toy():
    """Makes the benchmark of the toy with these forwards as providers, the first of them ours."""

    def make(*names, flops=None, **more):
        providers = {name: missing if name == "missing" else lambda c, d, f=FORWARDS[name]: f for name in names}
        providers.update({name: lambda c, d, f=forward: f for name, forward in more.items()})
        cases = [Case("small", {"rows": 4, "width": 8}), Case("large", {"rows": 16, "width": 8})]
        tokens = Sweep("tokens", "tokens", [Case(str(n), {"rows": n, "width": 8}, n) for n in (2, 4, 8)])
        return Benchmark(
            *("toy", "toy-op", cases, inputs, providers, product),
            traffic=lambda case, mode: case["rows"] * case["width"] * (6 if mode == "backward" else 4),
            flops=flops,
            sweeps={"tokens": tokens},
        )

    return make


class _Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.recorded = True

    def elapsed_time(self, end):
        assert self.recorded
        assert end.recorded
        return EVENT_MS


class _Graph(TorchDispatchMode):
    """What a device records of a queue: operations and the memory they write, not the values that the host read."""

    def __init__(self):
        super().__init__()
        self.recorded = []

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        results = operation(*arguments, **(options or {}))
        read = {_memory(tensor) for tensor in tree_leaves((arguments, options)) if isinstance(tensor, torch.Tensor)}
        written = [tensor for tensor in tree_leaves(results) if isinstance(tensor, torch.Tensor)]
        self.recorded.append((operation, arguments, options or {}, [_memory(t) not in read and t for t in written]))
        return results

    def replay(self):
        with torch.no_grad():
            for operation, arguments, options, written in self.recorded:
                results = tree_leaves(operation(*arguments, **options))
                for target, result in zip(written, results, strict=False):
                    if target is not False:
                        target.copy_(result)


def _memory(tensor):
    return tensor.untyped_storage().data_ptr()


class _Stream:
    def wait_stream(self, other):
        return


@pytest.fixture
def backend():
    """A stand-in for torch.npu: every event pair is 2.5 ms apart, every peak 3 MiB above what is allocated."""
    debug = SimpleNamespace(mode=0)
    return SimpleNamespace(
        is_available=lambda: True,
        current_device=lambda: 0,
        Event=_Event,
        synchronize=lambda: None,
        get_device_name=lambda: "Ascend910B4",
        memory_allocated=lambda: 10 * MIB,
        max_memory_allocated=lambda: (10 + PEAK_MIB) * MIB,
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
        NPUGraph=_Graph,
        graph=lambda graph: graph,
        Stream=_Stream,
        current_stream=_Stream,
        stream=lambda stream: contextlib.nullcontext(),
        get_sync_debug_mode=lambda: debug.mode,
        set_sync_debug_mode=lambda mode: setattr(debug, "mode", mode),
    )


@pytest.fixture
def npu(monkeypatch, backend):
    """An NPU whose tensors are the CPU's."""
    monkeypatch.setattr("npu_bench.devices._FLUSH_BYTES", {"npu": 4096})
    device = Accelerator("npu", backend, torch.device("cpu"))
    device.copy_bytes, device.matmul_size = 4096, 16
    return device


@pytest.fixture
def cpu(monkeypatch):
    """The CPU, with a small cache to flush and a small copy."""
    monkeypatch.setattr("npu_bench.devices._FLUSH_BYTES", {"cpu": 4096})
    monkeypatch.setattr(Cpu, "copy_bytes", 4096)
    return Cpu()


@pytest.fixture
def environment():
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    return Environment("chip", "0.1.0+gabc", {"toy-op": "0.1.0", "torch": "2.9"}, "npu-bench toy", now)


@pytest.fixture
def measure(environment):
    """Runs a benchmark on a device and returns the run."""
    from npu_bench import run

    def measured(benchmark, device, modes=("forward", "full"), sweep=None, cases=None, **options):
        return run(
            *(benchmark, device, environment, benchmark.select(sweep, cases)),
            modes=modes,
            providers=list(benchmark.providers),
            budget_s=0.001,
            progress=lambda step: None,
            **options,
        )

    return measured
