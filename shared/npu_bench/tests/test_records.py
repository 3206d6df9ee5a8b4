import dataclasses
import json

import pytest
from npu_bench import BenchError, Record, append, load, records_of
from npu_bench.compare import compare
from npu_bench.records import points, versions

LIGER_FIELDS = {
    *("kernel_name", "kernel_provider", "metric_name", "metric_unit", "gpu_name", "x_name", "x_label", "x_values"),
    *("y_values_50", "y_values_20", "y_values_80", "timestamp", "kernel_operation_mode", "extra_benchmark_config_str"),
}


def record(version="1.0", timestamp="2030-01-01 00:00:00", ys=(1.0, 2.0), spread=0.1, xs=(1, 2)):
    return Record(
        *("toy", "ours", "speed", "ms", "chip", "tokens", "tokens", list(xs), list(ys)),
        [y and y * (1 - spread) for y in ys],
        [y and y * (1 + spread) for y in ys],
        *(timestamp, "full", "{}", version),
    )


def test_records_have_ligers_fields_and_a_version(toy, measure, npu, tmp_path):
    run = measure(toy("product"), npu, sweep="tokens")
    append(tmp_path / "history.json", records_of(run))
    entries = json.loads((tmp_path / "history.json").read_text())
    assert all(set(entry) == LIGER_FIELDS | {"version"} for entry in entries)
    assert {(e["metric_name"], e["metric_unit"], e["kernel_operation_mode"]) for e in entries} == {
        (metric, unit, mode)
        for metric, unit in (("speed", "ms"), ("wall", "ms"), ("host", "us"), ("memory", "MB"))
        for mode in ("forward", "full")
    }
    speed = next(entry for entry in entries if entry["metric_name"] == "speed")
    assert (speed["x_name"], speed["x_values"], speed["y_values_50"]) == ("tokens", [2, 4, 8], [2.5] * 3)
    assert (speed["gpu_name"], speed["version"]) == ("chip", "0.1.0+gabc")
    assert json.loads(speed["extra_benchmark_config_str"])["cache"] == "cold"


def test_unmeasured_memory_has_no_record(toy, measure, cpu):
    assert "memory" not in {record.metric_name for record in records_of(measure(toy("product"), cpu))}


def test_wrong_case_is_a_null_between_right_ones(toy, measure, npu):
    def wrong_when_large(x, weight):
        return x * weight + (x.shape[0] > 4)

    speed = records_of(measure(toy(ours=wrong_when_large), npu))[0]
    assert speed.x_values == ["small", "large"]
    assert speed.y_values_50 == [2.5, None]


def test_history_keeps_versions_apart(tmp_path):
    path = tmp_path / "deep" / "history.json"
    append(path, [record("1.0", ys=(1.0, 2.0))])
    append(path, [record("1.1", ys=(0.5, 1.0), timestamp="2030-02-01 00:00:00")])
    history = load(path)
    assert len(history) == 2
    assert versions(history) == ["1.0", "1.1"]
    assert [p.p50 for p in points(history, "1.0").values()] == [1.0, 2.0]
    assert [p.p50 for p in points(history, "1.1").values()] == [0.5, 1.0]


def test_latest_run_of_a_version_counts_point_by_point():
    history = [record(timestamp="2030-01-02 00:00:00", ys=(7.0,), xs=(2,)), record(ys=(1.0, 2.0))]
    assert {key.x: point.p50 for key, point in points(history, "1.0").items()} == {1: 1.0, 2: 7.0}


def test_broken_history_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "history.json"
    path.write_text("{")
    with pytest.raises(BenchError, match="no history"):
        append(path, [record()])
    assert path.read_text() == "{"


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [(1.0, 0.5, "less"), (1.0, 2.0, "MORE"), (1.0, 1.05, "same"), (1.0, None, "BROKEN"), (None, 1.0, "works now")],
)
def test_comparison_says_what_changed_beyond_the_spread(tmp_path, before, after, verdict):
    path = tmp_path / "history.json"
    append(path, [record("1.0", ys=(before,), xs=(1,)), record("1.1", ys=(after,), xs=(1,))])
    table = compare(f"{path}@1.0", f"{path}@1.1")
    assert table.title == "1.0 -> 1.1"
    assert [row[4] for row in table.rows] == [verdict]
    assert table.rows[0][-1] == (f"{after / before:.2f}" if before and after else "-")


def test_comparison_refuses_what_is_not_there(tmp_path):
    path, other = tmp_path / "history.json", tmp_path / "other.json"
    append(path, [record()])
    append(other, [dataclasses.replace(record(), gpu_name="another chip")])
    with pytest.raises(BenchError, match=r"no version 9: it has 1\.0"):
        compare(f"{path}@9", str(path))
    with pytest.raises(BenchError, match="no point in common"):
        compare(str(path), str(other))
