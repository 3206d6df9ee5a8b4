import dataclasses
from types import SimpleNamespace

import pytest
import torch
from npu_bench import error_of_whole, relative_error
from npu_bench.report import document, tables_of

WRONG = ("one_wrong_row", "not_a_number", "wrong_gradient", "no_gradient", "overwrites_its_input")


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_provider_is_reported_and_not_timed(toy, measure, cpu, wrong):
    run = measure(toy("product", wrong), cpu, cases=["small"])
    right, bad = (row for row in run.rows if row.mode == "full")
    assert right.right
    assert right.verdict.startswith("ok")
    assert not bad.right
    assert bad.verdict.startswith("WRONG")
    assert (bad.device_ms, bad.wall_ms, bad.host_us, bad.rate) == (None,) * 4


@pytest.mark.parametrize(
    ("provider", "reason"),
    [
        ("one_wrong_row", "output without gradients 0"),
        ("wrong_gradient", "gradient of weight"),
        ("no_gradient", "gradient of weight is missing"),
        ("overwrites_its_input", "x overwritten"),
    ],
)
def test_verdict_names_what_is_wrong(toy, measure, cpu, provider, reason):
    row = measure(toy(provider), cpu, modes=["forward"], cases=["small"]).rows[0]
    assert reason in row.verdict


def test_overwritten_inputs_are_restored_for_the_others(toy, measure, cpu):
    run = measure(toy("overwrites_its_input", "product"), cpu, modes=["forward"])
    assert [row.right for row in run.rows] == [False, True] * 2


def test_broken_and_missing_providers_leave_the_others_alone(toy, measure, cpu):
    run = measure(toy("raises", "missing", "product"), cpu, modes=["forward"], cases=["small"])
    assert [row.verdict for row in run.rows[:2]] == [
        "failed: RuntimeError: does not compile",
        "unavailable: is not installed",
    ]
    assert run.rows[2].right


def test_case_begins_with_no_provider_and_no_mode_after_its_time(toy, measure, cpu, monkeypatch):
    """With a clock that moves when the peer is called: in its check, or not before it is timed."""
    now = [0.0]
    monkeypatch.setattr("npu_bench.runner.time", SimpleNamespace(perf_counter=lambda: now[0]))

    def slow(x, weight):
        now[0] += 1.0
        return x * weight

    for seconds, right in ((0.5, [False] * 4), (2.5, [True, True, False, False]), (1e9, [True] * 4)):
        now[0] = 0.0
        run = measure(toy("product", slow=slow), cpu, case_s=seconds, modes=["forward", "full"], cases=["small"])
        assert [row.right for row in run.rows] == right
        assert all(row.right or row.verdict == "left out: the time for this case was over" for row in run.rows)
    now[0] = 0.0
    run = measure(toy("product", slow=slow, peer=lambda x, w: w * x), cpu, case_s=0.5, modes=["forward"], cases=["small"])
    assert run.rows[2].verdict.startswith("left out")


def test_modes_with_gradients_are_left_out_of_a_case_without_any(toy, measure, cpu):
    benchmark = toy("product")
    inputs = benchmark.inputs
    benchmark = dataclasses.replace(
        benchmark, inputs=lambda *case: {name: tensor.detach() for name, tensor in inputs(*case).items()}
    )
    run = measure(benchmark, cpu, modes=["forward", "backward", "full"], cases=["small"])
    assert [row.right for row in run.rows] == [True, False, False]
    assert {row.verdict for row in run.rows[1:]} == {"unavailable: nothing in this case has a gradient"}


def test_case_that_is_too_large_leaves_the_others_alone(toy, measure, cpu):
    def reference(x, weight):
        if x.shape[0] > 4:
            raise torch.OutOfMemoryError("tried to allocate much")
        return x * weight

    benchmark = dataclasses.replace(toy("product"), reference=reference)
    run = measure(benchmark, cpu, modes=["forward"])
    assert [row.right for row in run.rows] == [True, False]
    assert run.rows[1].verdict == "failed: OutOfMemoryError: tried to allocate much"


def test_wrong_provider_has_no_ratio_and_is_no_peer(toy, measure, npu):
    run = measure(toy("product", "one_wrong_row"), npu, modes=["forward"], cases=["small"])
    (table,) = tables_of(run)
    columns = [i for i, header in enumerate(table.headers) if header.endswith("vs best peer")]
    ratios = [[row[i] for i in columns] for row in table.rows]
    assert ratios == [["-", "-"], ["-", "-"]]


def test_another_form_of_ours_is_no_peer(toy, measure, npu):
    forms = {"ours_compiled": lambda x, w: x * w, "peer": lambda x, w: w * x}
    for names, ratio in ((["ours_compiled"], "-"), (["ours_compiled", "peer"], "1.00")):
        run = measure(toy("product", **{name: forms[name] for name in names}), npu, modes=["forward"], cases=["small"])
        (table,) = tables_of(run)
        assert table.rows[0][table.headers.index("device vs best peer")] == ratio


def test_rates_floors_and_memory_follow_from_events_and_statistics(toy, measure, npu):
    run = measure(toy("product", peer=lambda x, w: w * x), npu, modes=["full"], cases=["small"])
    row = run.rows[0]
    assert row.device_ms.p50 == row.device_ms.p20 == 2.5
    assert row.memory_mib.p50 == 3
    assert run.ceilings.copy_gbs == pytest.approx(2 * 4096 / 2.5e-3 / 1e9)
    assert row.rate == pytest.approx(4 * 8 * (4 + 6) / 2.5e-3 / 1e9)
    assert row.floor_ms / row.device_ms.p50 == pytest.approx(row.rate / run.ceilings.copy_gbs)
    (table,) = tables_of(run)
    assert table.rows[0][4] == "1.00"


def test_operations_bound_a_case_that_has_more_of_them_than_bytes(toy, measure, npu):
    run = measure(toy("product", flops=lambda case, mode: 10**6), npu, modes=["backward"], cases=["small"])
    assert run.ceilings.matmul_tflops == pytest.approx(2 * 16**3 / 2.5e-3 / 1e12)
    assert run.rows[0].rate_unit == "TFLOP/s"
    assert run.rows[0].rate == pytest.approx(1e6 / 2.5e-3 / 1e12)


def test_no_grad_forward_runs_without_gradients_and_the_rest_with(toy, measure, cpu):
    seen = []

    def forward(x, weight):
        seen.append(torch.is_grad_enabled())
        return x * weight

    measure(toy(ours=forward), cpu, modes=["forward"], cases=["small"])
    assert seen[0] is False  # the check runs it both ways
    assert all(seen[1:])
    del seen[:]
    measure(toy(ours=forward), cpu, modes=["no-grad-forward"], cases=["small"])
    assert not any(seen[2:])


def test_all_providers_get_the_same_tensors(toy, measure, cpu):
    seen = {"a": set(), "b": set()}

    def forward(name):
        def run(x, weight):
            seen[name].add((x.data_ptr(), weight.data_ptr()))
            return x * weight

        return run

    measure(toy(a=forward("a"), b=forward("b")), cpu, cases=["small"])
    assert len(seen["a"]) == 1
    assert seen["a"] == seen["b"]


def test_error_is_relative_to_element_and_scale():
    expected = torch.tensor([3.0, -4.0, 0.0, 0.0])  # rms 2.5
    assert relative_error(expected, expected) == 0
    assert relative_error(expected + torch.tensor([0.0, 0.0, 0.5, 0.0]), expected) == pytest.approx(0.2)
    assert relative_error(expected + torch.tensor([0.0, 1.3, 0.0, 0.0]), expected) == pytest.approx(0.2)
    assert relative_error(torch.full((4,), torch.nan), expected) == torch.inf
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0


def test_an_error_of_the_whole_is_of_the_norm_and_a_benchmark_may_ask_for_it(toy, measure, cpu):
    expected = torch.tensor([3.0, 0.0, 4.0])
    assert error_of_whole(expected, expected) == 0
    assert error_of_whole(expected + torch.tensor([0.0, 1.0, 0.0]), expected) == pytest.approx(0.2)
    assert not error_of_whole(torch.full((3,), torch.nan), expected) <= 1
    lenient = dataclasses.replace(toy("one_wrong_row", "no_gradient"), error=lambda found, right: 0.0)
    run = measure(lenient, cpu, cases=["small"], modes=["full"])
    assert [row.right for row in run.rows] == [True, False]


def test_markdown_states_device_versions_date_and_command(toy, measure, npu, environment):
    text = document(measure(toy("product", "one_wrong_row"), npu))
    first_line = text.splitlines()[0]
    for stated in ("chip", "toy-op 0.1.0", "torch 2.9", environment.date, "`npu-bench toy`", "device copy"):
        assert stated in first_line
    assert "**toy, forward**" in text
    assert "**toy, full**" in text
    assert "| small | one_wrong_row | WRONG: " in text


def test_unavailable_provider_is_named_once_with_its_reason(toy, measure, npu):
    text = document(measure(toy("product", "missing"), npu))
    assert text.count("missing") == 1
    assert "- not run: missing, unavailable: is not installed." in text
