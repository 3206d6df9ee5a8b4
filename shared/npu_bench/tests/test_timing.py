import pytest
import torch
from npu_bench import Cpu, Quantiles
from npu_bench.modes import timed_call
from npu_bench.timing import MIN_SAMPLES, device_times, host_times, peak_memory, wall_times


def test_quantiles_are_median_and_20th_and_80th_percentile():
    quantiles = Quantiles.of([float(i) for i in range(101)])
    assert (quantiles.p50, quantiles.p20, quantiles.p80, quantiles.samples) == (50, 20, 80, 101)


def test_one_sample_is_refused():
    with pytest.raises(ValueError, match="at least 2"):
        Quantiles.of([1.0])


def test_calls_take_turns_with_a_flush_before_each(cpu):
    log = []

    class Logging(Cpu):
        def flush(self):
            log.append("flush")

    times = device_times({name: lambda name=name: log.append(name) for name in "ab"}, Logging(), 0.0)
    samples = log[-4 * MIN_SAMPLES :]
    assert samples[::2] == ["flush"] * 2 * MIN_SAMPLES
    turns = list(zip(samples[1::4], samples[3::4], strict=True))
    assert set(turns) == {("a", "b"), ("b", "a")}  # neither always comes after the other
    assert times["a"].samples == times["b"].samples == MIN_SAMPLES


def test_device_is_kept_busy_while_the_host_queues_a_slow_call(npu, monkeypatch):
    flushes = 0

    def flush():
        nonlocal flushes
        flushes += 1

    monkeypatch.setattr(npu, "flush", flush)
    device_times({"slow": lambda: sum(range(10_000))}, npu, 0.0)
    assert flushes > 5 + 2 * MIN_SAMPLES  # 5 to time a flush; more than one before each of the samples


@pytest.mark.parametrize("clock", [wall_times, host_times])
def test_host_clocks_take_several_samples(cpu, clock):
    times = clock({"a": lambda: None}, cpu, 0.0)
    assert times["a"].samples >= MIN_SAMPLES


def test_peak_memory_is_what_is_above_the_inputs(npu):
    assert peak_memory(lambda: lambda: None, npu).p50 == 3


def test_memory_is_not_invented_where_nobody_counts(cpu):
    assert peak_memory(lambda: lambda: None, cpu) is None


@pytest.mark.parametrize(("mode", "forwards"), [("forward", 3), ("no-grad-forward", 3), ("backward", 0), ("full", 3)])
def test_mode_repeats_its_own_work_alone(mode, forwards):
    count = 0

    def forward(x):
        nonlocal count
        count += 1
        return 2 * x

    x = torch.ones(3, requires_grad=True)
    call = timed_call(mode, forward, {"x": x}, [torch.full((3,), 5.0)])
    count = 0
    for _ in range(3):
        result = call()
    assert count == forwards
    expected = [2.0] * 3 if "forward" in mode else [10.0] * 3
    assert (result if "forward" in mode else result[0]).tolist() == expected
    assert x.grad is None
