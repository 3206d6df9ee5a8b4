import importlib.util

import pytest
from npu_bench.plots import draw
from npu_bench.report import document, tables_of
from npu_bench.scaling import growths


@pytest.fixture
def sweep_of(toy, measure, npu, monkeypatch):
    """Runs the toy over 2, 4 and 8 rows with these device times and spreads."""

    def run(times, spread=0.0):
        from npu_bench import Quantiles

        remaining = iter(times)

        def device_times(calls, device, budget_s):
            value = next(remaining)
            return {name: Quantiles(value, value * (1 - spread), value * (1 + spread), 10) for name in calls}

        monkeypatch.setattr("npu_bench.runner.device_times", device_times)
        for clock in ("wall_times", "host_times"):
            monkeypatch.setattr(f"npu_bench.runner.{clock}", lambda calls, device, budget_s: dict.fromkeys(calls))
        return measure(toy("product"), npu, modes=["forward"], sweep="tokens")

    return run


@pytest.mark.parametrize(
    ("times", "spread", "expected"),
    [
        ((1.0, 2.0, 4.0), 0.0, ["1.00", "1.00"]),
        ((1.0, 1.0, 1.5), 0.0, ["0.50", "0.75"]),  # fixed costs
        ((1.0, 2.0, 6.0), 0.0, ["1.00", "1.50 CLIFF"]),
        ((1.0, 2.0, 6.0), 0.2, ["1.00", "1.50"]),  # 4.8 / 2.4 is within twice the work
    ],
)
def test_time_that_outgrows_the_work_is_a_cliff(sweep_of, times, spread, expected):
    run = sweep_of(times, spread)
    assert [str(growth) for growth in growths(run).values()] == expected
    (table,) = tables_of(run)
    column = table.headers.index("growth")
    assert [row[column] for row in table.rows] == ["-", *expected]
    cliffs = "product forward at 8 (1.50)" if "CLIFF" in expected[-1] else "none"
    assert f"- cliffs: {cliffs}." in document(run)


def test_named_cases_have_no_growth(toy, measure, npu):
    run = measure(toy("product"), npu)
    assert growths(run) == {}
    assert "growth" not in document(run)


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_plot_marks_cliffs(sweep_of):
    def labels(times):
        return {text.get_text() for text in draw(sweep_of(times)).axes[0].get_legend().get_texts()}

    assert "cliff" in labels((1.0, 2.0, 6.0))
    assert "cliff" not in labels((1.0, 2.0, 4.0))
