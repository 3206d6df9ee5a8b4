import pytest
from npu_bench import BenchError


def replayed(measure, toy, npu, **forwards):
    run = measure(toy("product", **forwards), npu, modes=["forward", "graph"], cases=["small"])
    return {row.provider: row for row in run.rows if row.mode == "graph"}, run


def test_replay_is_checked_and_timed(toy, measure, npu):
    rows, run = replayed(measure, toy, npu)
    row = rows["product"]
    assert row.verdict.startswith("ok")
    assert row.device_ms.p50 == 2.5
    assert row.memory_mib is None
    assert row.rate == pytest.approx(4 * 8 * (4 + 6) / 2.5e-3 / 1e9)  # bytes of forward and backward
    assert run.rows[0].mode == "forward"


def test_value_that_the_host_read_is_found_in_the_replay(toy, measure, npu):
    def recorded_number(x, weight):
        first = x.detach().reshape(-1)[0]
        return x * weight + (first - first.item())

    rows, run = replayed(measure, toy, npu, recorded_number=recorded_number)
    assert all(row.right for row in run.rows if row.mode == "forward")
    assert rows["recorded_number"].verdict.startswith("WRONG: output 0 of a replay")
    assert rows["recorded_number"].device_ms is None


def test_provider_that_waits_is_not_recorded(toy, measure, npu, backend):
    def waits(x, weight):
        if backend.get_sync_debug_mode() == "error":
            raise RuntimeError("called a synchronizing operation")
        return x * weight

    rows, run = replayed(measure, toy, npu, waits=waits)
    assert rows["waits"].verdict == "failed: RuntimeError: called a synchronizing operation"
    assert rows["product"].right
    assert backend.get_sync_debug_mode() == 0
    assert all(row.right for row in run.rows if row.mode == "forward")


def test_inputs_are_restored_after_recording(toy, measure, npu):
    seen = []

    def forward(x, weight):
        seen.append(x.detach().flatten().tolist())
        return x * weight

    measure(toy(ours=forward), npu, modes=["graph", "forward"], cases=["small"])
    assert seen[0][::-1] in seen  # recorded with
    assert seen[-1] == seen[0]


def test_graphs_are_refused_without_a_queue(toy, measure, cpu):
    with pytest.raises(BenchError, match="modes has graph"):
        measure(toy("product"), cpu, modes=["graph"])


def test_backend_without_graphs_is_named(toy, measure, npu, backend):
    del backend.NPUGraph
    rows, _ = replayed(measure, toy, npu)
    assert rows["product"].verdict == "unavailable: torch.npu has no NPUGraph"
