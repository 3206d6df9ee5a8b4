import contextlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from npu_bench import BenchError, open_device, over_stand_in, runner
from npu_bench.launches import count_launches, empty_function, one_operator, returning_at_once
from npu_bench.report import document, tables_of


@pytest.fixture
def stand_in(monkeypatch):
    """In the place of npu-offline's: a counter, and whether launches do something."""
    state = SimpleNamespace(count=3, working=True)

    @contextlib.contextmanager
    def kernels_do_nothing():
        state.working = False
        yield
        state.working = True

    package, module = ModuleType("npu_offline"), ModuleType("npu_offline.cann")
    module.launched, module.kernels_do_nothing = lambda: state.count, kernels_do_nothing
    for one in (package, module):
        monkeypatch.setitem(sys.modules, one.__name__, one)
    monkeypatch.setenv("NPU_OFFLINE_CANN_RUNTIME", "a library")
    return state


def test_launches_over_the_stand_in_are_those_that_it_counts(stand_in, npu):
    assert over_stand_in()

    def call():
        stand_in.count += 5

    assert count_launches(call, npu).p50 == 5


def test_launches_of_a_torch_npu_with_a_queue_of_its_own_are_waited_for(stand_in, npu, monkeypatch):
    queued = []

    def synchronize():
        stand_in.count += len(queued)
        queued.clear()

    monkeypatch.setattr(npu, "synchronize", synchronize)
    queued.append("of before")
    assert count_launches(lambda: queued.extend("ab"), npu).p50 == 2


def test_over_the_stand_in_alone_launches_can_return_at_once(stand_in, npu, cpu, monkeypatch):
    with returning_at_once(npu):
        assert not stand_in.working
    with returning_at_once(cpu):
        assert stand_in.working
    monkeypatch.delenv("NPU_OFFLINE_CANN_RUNTIME")
    with returning_at_once(npu):
        assert stand_in.working


def test_nobody_counts_launches_on_a_cpu_or_a_chip(npu, cpu, monkeypatch):
    monkeypatch.delenv("NPU_OFFLINE_CANN_RUNTIME", raising=False)
    assert count_launches(lambda: None, cpu) is None
    assert count_launches(lambda: None, npu) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_kernels_copies_and_fills_of_cuda_are_counted():
    device = open_device("cuda")
    x, y = torch.ones(1000, device="cuda"), torch.empty(1000, device="cuda")

    def call():
        x.sin()
        y.copy_(x)
        y.zero_()

    call()
    assert count_launches(call, device).p50 == 3
    assert count_launches(one_operator(device.torch_device), device).p50 >= 1
    assert count_launches(empty_function(device.torch_device), device).p50 == 0


def test_the_empty_function_is_differentiated():
    dx, dweight = empty_function(torch.device("cpu"))()
    assert torch.equal(dx, torch.ones(16, 16)) and torch.equal(dweight, torch.ones(16, 16))


def test_launches_of_a_run_are_counted_after_all_times_and_are_a_column(stand_in, npu, toy, measure, monkeypatch):
    order = []
    timed, counted = runner.wall_times, runner.count_launches
    monkeypatch.setattr(runner, "wall_times", lambda *a: (order.append("time"), timed(*a))[1])
    monkeypatch.setattr(runner, "count_launches", lambda *a: (order.append("count"), counted(*a))[1])

    def one_launch(x, weight):
        stand_in.count += 1
        return x * weight

    modes = ["forward", "no-grad-forward"]
    run = measure(toy("one_wrong_row", ours=one_launch), npu, modes=modes, launches=True)
    assert order == ["time"] * 4 + ["count"] * 4
    assert [row.launches and row.launches.p50 for row in run.rows] == [None, 1] * 4
    table, _ = tables_of(run)
    assert [row[table.headers.index("launches")] for row in table.rows] == ["-", "1"] * 2
    assert "- launches: " in document(run)
    assert "launches" not in document(measure(toy("product"), npu, modes=modes))


def test_launches_are_refused_where_nobody_counts_them(toy, measure, cpu):
    with pytest.raises(BenchError, match="nobody counts"):
        measure(toy("product"), cpu, launches=True)
