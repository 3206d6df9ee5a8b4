import csv
import dataclasses

import pytest
from npu_bench import BenchError, append, main, records_of
from npu_bench.export import export

# What Liger-Kernel's benchmarks_visualizer.py reads of each row.
READ_BY_VISUALIZER = {
    *("kernel_name", "kernel_provider", "kernel_operation_mode", "metric_name", "metric_unit", "x_label"),
    *("x_value", "y_value_50", "y_value_20", "y_value_80", "extra_benchmark_config_str"),
}


@pytest.fixture
def history(toy, measure, npu, tmp_path):
    """Two runs of a sweep, the second another version, and one of named cases."""
    path = tmp_path / "history.json"
    records = records_of(measure(toy("product"), npu, sweep="tokens"))
    append(path, [dataclasses.replace(record, version="0.0.9", timestamp="2000-01-01 00:00:00") for record in records])
    append(path, records)
    append(path, records_of(measure(toy("product"), npu, cases=["small"])))
    return path


def test_csv_has_a_row_a_point_of_one_version_and_axis(history, tmp_path, capsys):
    target = tmp_path / "deep" / "all_benchmark_data.csv"
    assert main(["export", str(history), str(target), "--sweep", "tokens"]) == 0
    with target.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert set(rows[0]) >= READ_BY_VISUALIZER
    assert {row["liger_version"] for row in rows} == {"0.1.0+gabc"}
    speed = [row for row in rows if row["metric_name"] == "speed" and row["kernel_operation_mode"] == "full"]
    assert [(row["x_value"], row["y_value_50"]) for row in speed] == [("2", "2.5"), ("4", "2.5"), ("8", "2.5")]
    assert f"{len(rows)} points" in capsys.readouterr().out


def test_repeated_run_replaces_its_points(history, tmp_path, toy, measure, npu):
    before = export(str(history), tmp_path / "a.csv", "tokens")
    append(history, records_of(measure(toy("product"), npu, sweep="tokens")))
    assert export(str(history), tmp_path / "b.csv", "tokens") == before


def test_axis_must_be_named_where_there_are_several(history, tmp_path):
    with pytest.raises(BenchError, match="must be one of those that .* has: tokens, case"):
        export(str(history), tmp_path / "a.csv", None)
    assert export(f"{history}@0.0.9", tmp_path / "a.csv", None) == 4 * 2 * 3  # metrics, modes, sizes
