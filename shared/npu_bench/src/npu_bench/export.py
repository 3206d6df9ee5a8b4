"""A history as the CSV file that Liger-Kernel's `benchmarks_visualizer.py` draws."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .compare import chosen_version
from .errors import BenchError
from .records import Record, load

# The columns of Liger-Kernel's all_benchmark_data.csv, one row a point.
_COLUMNS = (
    *(
        "kernel_name",
        "kernel_provider",
        "kernel_operation_mode",
        "metric_name",
        "metric_unit",
        "x_name",
        "x_label",
        "x_value",
    ),
    *("y_value_50", "y_value_20", "y_value_80", "extra_benchmark_config_str", "gpu_name", "timestamp", "liger_version"),
)


def export(source: str, target: Path, x_name: str | None) -> int:
    """Write one version and one x axis of a history; the visualizer would draw several of either as one line.

    Args:
        source: FILE (its latest version) or FILE@VERSION.
        target: the CSV file, which is replaced.
        x_name: which x axis ("tokens", "hidden", ...); None where the version has one alone.

    Returns:
        How many points were written: the latest of each kind, without those that have no right result.

    Raises:
        BenchError: there is no such file, version or x axis.
    """
    name, version = chosen_version(source)
    records = [record for record in load(Path(name)) if record.version == version]
    known = list(dict.fromkeys(record.x_name for record in records))
    if x_name is None and len(known) == 1:
        x_name = known[0]
    if x_name not in known:
        raise BenchError(f"sweep is {x_name!r} and must be one of those that {source} has: {', '.join(known)}.")
    latest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for record in sorted(records, key=lambda record: record.timestamp):
        if record.x_name == x_name:
            for row in _rows(record):
                latest[tuple(row[column] for column in (*_COLUMNS[:5], "x_value", "gpu_name"))] = row
    rows = [row for row in latest.values() if row["y_value_50"] is not None]
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, _COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return len(rows)


def _rows(record: Record) -> Iterator[dict[str, Any]]:
    same = {column: getattr(record, column) for column in _COLUMNS if hasattr(record, column)}
    points = zip(record.x_values, record.y_values_50, record.y_values_20, record.y_values_80, strict=True)
    for x, p50, p20, p80 in points:
        ys = {"y_value_50": p50, "y_value_20": p20, "y_value_80": p80}
        yield {**same, "x_value": x, **ys, "liger_version": record.version}
