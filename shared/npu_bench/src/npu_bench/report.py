"""What a run says, as tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .runner import Row, Run
from .scaling import TOLERANCE, Growth, growths
from .tables import Table, markdown, number
from .timing import Quantiles

_HEADERS = (
    "case",
    "provider",
    "result",
    "device ms (20-80 %)",
    "device vs best peer",
    "floor ms",
    "of ceiling",
    "rate",
    "wall ms",
    "wall vs best peer",
    "host us",
    "peak MB",
)
_LABELS = 3
_GROWTH_COLUMN = _HEADERS.index("rate")  # of sweeps alone
_LAUNCHES = "launches"  # the last column, of runs that counted them

_NOTES = """\
- result: largest error against the reference; WRONG results are not timed.
- device: time stamps in the device's queue (on a CPU, the host's clock), last-level cache overwritten before each call;
  median and 20th-80th percentile.
- vs best peer: device or wall time over that of the fastest right provider that is not ours; below 1 is faster.
- floor: the bytes (or operations) that must move, at the ceiling; of ceiling: floor over device time.
- wall: host clock over many calls with one synchronisation at the end, per call, caches warm; host: around the call
  alone, without waiting for the device.
{growth}- peak MB (2^20 bytes): allocated above the inputs during the call, results and what the forward saved included.
"""

_GROWTH_NOTE = f"""\
- growth: device time over that of the size before, over the same ratio of floors: 1 is a straight line. CLIFF: above
  {TOLERANCE}, and not within the spread of the two times.
"""

_LAUNCHES_NOTE = """\
- launches: kernels, copies and fills that one call puts into the device's queue.
"""

_GRAPH_NOTE = """\
- graph: forward and backward recorded once, while the inputs held other values, and replayed; the result is the replay's.
"""


def tables_of(run: Run) -> list[Table]:
    """One table a mode."""
    return [_table(run, mode) for mode in dict.fromkeys(row.mode for row in run.rows)]


def header(run: Run) -> str:
    """What the numbers were measured with, in one paragraph."""
    ceilings = f"device copy {number(run.ceilings.copy_gbs, 4)} GB/s"
    if run.ceilings.matmul_tflops is not None:
        ceilings += f", matmul {number(run.ceilings.matmul_tflops, 4)} TFLOP/s"
    return f"{run.environment}; {ceilings} in the same run"


def notes(run: Run) -> str:
    """What the columns mean, and which providers could not run at all."""
    found = growths(run)
    growth = _GROWTH_NOTE + _cliffs(found) if found else ""
    graph = _GRAPH_NOTE if any(row.mode == "graph" for row in run.rows) else ""
    absent = [f"- not run: {provider}, {verdict}.\n" for provider, verdict in _absent(run).items()]
    launches = _LAUNCHES_NOTE if _counted(run) else ""
    return _NOTES.format(growth=growth) + launches + graph + "".join(absent)


def document(run: Run) -> str:
    """The run in Markdown."""
    return "\n".join([f"{header(run)}.\n", *(markdown(table) for table in tables_of(run)), notes(run)])


def _cliffs(found: Mapping[tuple[str, str, str], Growth]) -> str:
    cliffs = [
        f"{provider} {mode} at {case} ({growth.ratio:.2f})"
        for (case, mode, provider), growth in found.items()
        if growth.cliff
    ]
    return f"- cliffs: {', '.join(cliffs) or 'none'}.\n"


def _absent(run: Run) -> dict[str, str]:
    """Providers that are unavailable for every case, and why."""
    verdicts: dict[str, set[str]] = {}
    for row in run.rows:
        verdicts.setdefault(row.provider, set()).add(row.verdict)
    return {
        provider: min(said)
        for provider, said in verdicts.items()
        if all(verdict.startswith("unavailable") for verdict in said)
    }


def _counted(run: Run) -> bool:
    return any(row.launches is not None for row in run.rows)


def _table(run: Run, mode: str) -> Table:
    rows, absent, found = [], _absent(run), growths(run)
    for case in run.sweep.cases:
        group = [row for row in run.rows if row.mode == mode and row.case is case and row.provider not in absent]
        for row in group:
            cells = _cells(row, group, run.ours)
            if found:
                growth = found.get((case.name, mode, row.provider))
                cells.insert(_GROWTH_COLUMN, "-" if growth is None else str(growth))
            if _counted(run):
                cells.append("-" if row.launches is None else f"{row.launches.p50:g}")
            rows.append(cells)
    headers = [*_HEADERS[:_GROWTH_COLUMN], "growth", *_HEADERS[_GROWTH_COLUMN:]] if found else [*_HEADERS]
    headers += [_LAUNCHES] * _counted(run)
    return Table(f"{run.benchmark}, {mode}", headers, rows, _LABELS)


def _cells(row: Row, group: Sequence[Row], ours: str) -> list[str]:
    return [
        row.case.name,
        row.provider,
        row.verdict,
        _with_spread(row.device_ms),
        _against_peers(row, group, ours, lambda other: other.device_ms),
        number(row.floor_ms),
        "-" if row.floor_ms is None or row.device_ms is None else f"{row.floor_ms / row.device_ms.p50:.0%}",
        "-" if row.rate is None else f"{number(row.rate)} {row.rate_unit}",
        number(_median(row.wall_ms)),
        _against_peers(row, group, ours, lambda other: other.wall_ms),
        number(_median(row.host_us)),
        number(_median(row.memory_mib), 4),
    ]


def _median(value: Quantiles | None) -> float | None:
    return None if value is None else value.p50


def _with_spread(value: Quantiles | None) -> str:
    return "-" if value is None else f"{number(value.p50)} ({number(value.p20)}-{number(value.p80)})"


def _against_peers(row: Row, group: Sequence[Row], ours: str, time: Callable[[Row], Quantiles | None]) -> str:
    mine = time(row)
    others = (other for other in group if other.provider != ours and not other.provider.startswith("ours"))
    peers = [value.p50 for other in others if (value := time(other)) is not None]
    return "-" if mine is None or not peers else f"{mine.p50 / min(peers):.2f}"
