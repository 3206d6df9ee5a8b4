"""A run as its records tell it, for tables and plots where no device is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from .ceilings import Ceilings
from .compare import chosen_version
from .declaration import Benchmark, Sweep
from .environment import Environment
from .errors import BenchError
from .records import METRICS, Key, Record, load, points
from .runner import Measured, Row, Run, measured_row
from .timing import Quantiles

_NOT_SOFTWARE = ("cache", "copy_gbs", "matmul_tflops", "command")


def recorded_run(benchmark: Benchmark, source: str, sweep: Sweep, modes: Sequence[str], providers: Sequence[str]) -> Run:
    """The latest points of one version, of one device, as a run; ceilings and command are those of its last run.

    Args:
        benchmark: what was measured; floors follow from its formulas as they are.
        source: FILE (its latest version) or FILE@VERSION.
        sweep: the cases wanted; those without any record are left out.
        modes, providers: the ones wanted.

    Raises:
        BenchError: there is no such file, version or point.
    """
    name, version = chosen_version(source)
    records = [
        record
        for record in load(Path(name))
        if (record.kernel_name, record.x_name, record.version) == (benchmark.name, sweep.x_name, version)
        and record.kernel_operation_mode in modes
        and record.kernel_provider in providers
    ]
    if not records:
        raise BenchError(f"{source} has nothing of {benchmark.name} over {sweep.x_name} in these modes and providers.")
    last = max(records, key=lambda record: record.timestamp)
    config = json.loads(last.extra_benchmark_config_str)
    ceilings = Ceilings(config["copy_gbs"], config["matmul_tflops"])
    software = {key: value for key, value in config.items() if key not in _NOT_SOFTWARE}
    environment = Environment(last.gpu_name, version, software, config["command"], last.timestamp)
    rows = _rows(benchmark, sweep, ceilings, [record for record in records if record.gpu_name == last.gpu_name])
    cases = [case for case in sweep.cases if any(row.case is case for row in rows)]
    return Run(benchmark.name, benchmark.ours, Sweep(sweep.x_name, sweep.x_label, cases), environment, ceilings, rows)


def _rows(benchmark: Benchmark, sweep: Sweep, ceilings: Ceilings, records: Sequence[Record]) -> list[Row]:
    found = points(records, records[0].version)
    lines = dict.fromkeys((record.kernel_operation_mode, record.kernel_provider) for record in records)
    rows = []
    for case in sweep.cases:
        for mode, provider in lines:
            measured: list[Quantiles | None] = []
            keys = [
                Key(benchmark.name, provider, mode, metric, unit, records[0].gpu_name, sweep.x_name, case.position)
                for metric, (unit, _) in METRICS.items()
            ]
            if not any(key in found for key in keys):
                continue
            for key in keys:
                p50, p20, p80 = found.get(key, (None, None, None))
                known = p50 is not None and p20 is not None and p80 is not None
                measured.append(Quantiles(p50, p20, p80, 0) if known else None)  # type: ignore[arg-type]
            device_ms, wall_ms, host_us, memory, launches = measured
            if device_ms is None or wall_ms is None or host_us is None:
                rows.append(Row(case, mode, provider, "no right result"))
            else:
                one: Measured = (device_ms, wall_ms, host_us, memory)
                row = measured_row(benchmark, ceilings, case, mode, provider, "recorded", one)
                rows.append(replace(row, launches=launches))
    return rows
