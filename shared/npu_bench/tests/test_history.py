import importlib.util
from dataclasses import replace

import pytest
from npu_bench import MODES, BenchError, append, main, records_of
from npu_bench.history import recorded_run
from npu_bench.plots import draw
from npu_bench.report import tables_of
from npu_bench.timing import Quantiles


@pytest.fixture
def recorded(toy, measure, npu, tmp_path):
    """The run of a sweep, and the one that its records tell."""

    def both(**providers):
        benchmark = toy("product", **providers)
        run = measure(benchmark, npu, sweep="tokens")
        two = Quantiles(2, 2, 2, 2)
        run = replace(run, rows=[replace(row, launches=two) if row.right else row for row in run.rows])
        append(tmp_path / "history.json", records_of(run))
        sweep = benchmark.select("tokens", None)
        return run, recorded_run(benchmark, str(tmp_path / "history.json"), sweep, MODES, list(benchmark.providers))

    return both


def test_records_tell_the_same_tables_but_for_the_errors(recorded):
    run, told = recorded(peer=lambda x, w: w * x)

    def without_result(table):
        return [[*row[:2], *row[3:]] for row in table.rows]

    assert list(map(without_result, tables_of(told))) == list(map(without_result, tables_of(run)))
    assert {row.verdict for row in told.rows} == {"recorded"}
    assert told.environment == run.environment
    assert told.ceilings.copy_gbs == pytest.approx(run.ceilings.copy_gbs, rel=0.01)
    if importlib.util.find_spec("matplotlib") is not None:
        assert len(draw(told).axes) == 6


def test_wrong_point_stays_a_gap(recorded):
    _, told = recorded(wrong_when_large=lambda x, weight: x * weight + (x.shape[0] > 4))
    wrong = [row for row in told.rows if not row.right]
    assert {(row.case.name, row.provider, row.verdict) for row in wrong} == {("8", "wrong_when_large", "no right result")}


def test_absent_sweep_is_refused(recorded, toy, tmp_path):
    recorded()
    benchmark = toy("product")
    with pytest.raises(BenchError, match="has nothing of toy over case"):
        recorded_run(benchmark, str(tmp_path / "history.json"), benchmark.select(None, None), MODES, ["product"])
    with pytest.raises(BenchError, match="no version 9"):
        recorded_run(benchmark, f"{tmp_path / 'history.json'}@9", benchmark.select("tokens", None), MODES, ["product"])


def test_show_without_a_history_is_one_sentence(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "packages").mkdir()
    assert main(["show", "toy", "none.json"]) == 2
    assert "must be one of" in capsys.readouterr().err
