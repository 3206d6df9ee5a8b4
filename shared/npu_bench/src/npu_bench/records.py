"""Records in the JSON form that Liger-Kernel's benchmarks write, and a history of them.

A record is one curve: a kernel, a provider, a mode and a metric over x values. A history file is a list of records that
only grows: every run is appended, with its time and version; reading picks the latest points of the version asked for.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from .errors import BenchError
from .host import HostRun
from .runner import Row, Run
from .timing import Quantiles

# metric: unit, attribute of a row; those of `runner.Measured` first, in its order
METRICS = {
    "speed": ("ms", "device_ms"),
    "wall": ("ms", "wall_ms"),
    "host": ("us", "host_us"),
    "memory": ("MB", "memory_mib"),
    "launches": ("launches", "launches"),
}
HOST_METRICS = {name: METRICS[name] for name in ("host", "launches")}


@dataclass(frozen=True)
class Record:
    """One curve. A y of None: the provider did not run there, or its result was wrong.

    The fields are those of Liger-Kernel's `BenchmarkData`, with `version` (of the operator's package, and its revision)
    in the place of `liger_version`. `x_label`, `gpu_name` and `extra_benchmark_config_str` (JSON: how it was measured)
    are for people; a MB is 2^20 bytes, as it is there.
    """

    kernel_name: str
    kernel_provider: str
    metric_name: str
    metric_unit: str
    gpu_name: str
    x_name: str
    x_label: str
    x_values: list[float | str]
    y_values_50: list[float | None]
    y_values_20: list[float | None]
    y_values_80: list[float | None]
    timestamp: str
    kernel_operation_mode: str
    extra_benchmark_config_str: str
    version: str


class Key(NamedTuple):
    """What makes two points comparable."""

    kernel: str
    provider: str
    mode: str
    metric: str
    unit: str
    device: str
    x_name: str
    x: float | str


class Point(NamedTuple):
    """The percentiles at one x; None where there is no right result."""

    p50: float | None
    p20: float | None
    p80: float | None


def records_of(run: Run | HostRun) -> list[Record]:
    """The records of a run; providers that measured nothing at all have none."""
    of_host = isinstance(run, HostRun)
    names = list(dict.fromkeys((row.provider, row.mode) for row in run.rows))
    records = []
    for provider, mode in names:
        rows = [row for row in run.rows if (row.provider, row.mode) == (provider, mode)]
        for metric, (unit, attribute) in (HOST_METRICS if of_host else METRICS).items():
            values: list[Quantiles | None] = [getattr(row, attribute) for row in rows]
            if any(values):
                records.append(_record(run, provider, mode, metric, unit, rows, values))
    return records


def _record(
    run: Run | HostRun,
    provider: str,
    mode: str,
    metric: str,
    unit: str,
    rows: Sequence[Row],
    values: Sequence[Quantiles | None],
) -> Record:
    config: dict[str, object] = {"cache": "cold" if metric == "speed" else "warm"}
    if isinstance(run, HostRun):
        config["one_operator_us"] = _rounded(run.operator_us.p50)
        config["empty_function_us"] = _rounded(run.empty_us.p50)
    else:
        config["copy_gbs"] = _rounded(run.ceilings.copy_gbs)
        config["matmul_tflops"] = run.ceilings.matmul_tflops and _rounded(run.ceilings.matmul_tflops)
    config |= {"command": run.environment.command, **run.environment.software}
    return Record(
        kernel_name=run.benchmark,
        kernel_provider=provider,
        metric_name=metric,
        metric_unit=unit,
        gpu_name=run.environment.device,
        x_name=run.sweep.x_name,
        x_label=run.sweep.x_label,
        x_values=[row.case.position for row in rows],
        y_values_50=[None if value is None else value.p50 for value in values],
        y_values_20=[None if value is None else value.p20 for value in values],
        y_values_80=[None if value is None else value.p80 for value in values],
        timestamp=run.environment.timestamp,
        kernel_operation_mode=mode,
        extra_benchmark_config_str=json.dumps(config),
        version=run.environment.version,
    )


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def load(path: Path) -> list[Record]:
    """The records of a history file.

    Raises:
        BenchError: it is not one.
    """
    try:
        return [Record(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, json.JSONDecodeError, TypeError) as error:
        raise BenchError(f"{path} is no history of records: {error}") from None


def append(path: Path, records: Iterable[Record]) -> None:
    """Add records to a history file, which is made where it is missing, in one step."""
    history = (load(path) if path.exists() else []) + list(records)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, text=True)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump([asdict(record) for record in history], file, indent=1)
        file.write("\n")
    os.replace(temporary, path)


def versions(records: Iterable[Record]) -> list[str]:
    """Versions in the order of their latest run."""
    latest: dict[str, str] = {}
    for record in records:
        latest[record.version] = max(record.timestamp, latest.get(record.version, ""))
    return sorted(latest, key=lambda version: latest[version])


def points(records: Iterable[Record], version: str) -> dict[Key, Point]:
    """The latest point of each kind that a version has."""
    result: dict[Key, Point] = {}
    chosen = [record for record in records if record.version == version]
    for record in sorted(chosen, key=lambda record: record.timestamp):
        ys = zip(record.y_values_50, record.y_values_20, record.y_values_80, strict=True)
        for x, y in zip(record.x_values, ys, strict=True):
            result[_key(record, x)] = Point(*y)
    return result


def _key(record: Record, x: float | str) -> Key:
    return Key(
        record.kernel_name,
        record.kernel_provider,
        record.kernel_operation_mode,
        record.metric_name,
        record.metric_unit,
        record.gpu_name,
        record.x_name,
        x,
    )
