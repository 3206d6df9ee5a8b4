"""Plots of a run: device time, rate and memory over the cases, one column a mode."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .errors import BenchError
from .report import header
from .runner import Row, Run
from .scaling import growths
from .timing import Quantiles

Values = tuple[float, float, float]  # median, 20th and 80th percentile

_WIDTH, _HEIGHT = 5.0, 3.4  # inches of one plot
_TITLE_CHARACTERS = 50  # to a mode's width
_DPI = 130


def plot(run: Run, path: Path) -> None:
    """Write the picture, in the format that the file's suffix names.

    Raises:
        BenchError: matplotlib is missing, or nothing was measured.
    """
    figure = draw(run)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI)


def require_matplotlib() -> None:
    """Raises `BenchError` where it is missing: better before a long run than after it."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise BenchError("plots need matplotlib: pip install matplotlib") from None


def draw(run: Run) -> Any:
    """The picture, a `matplotlib.figure.Figure`. Raises as `plot` does."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measured = [row for row in run.rows if row.right]
    if not measured:
        raise BenchError("there is nothing to plot: no provider gave a right result.")
    modes = list(dict.fromkeys(row.mode for row in measured))
    units = " or ".join(dict.fromkeys(row.rate_unit for row in measured))
    kinds: list[tuple[str, Callable[[Row], Values | None]]] = [("device time, ms", _time), (f"rate, {units}", _rate)]
    if any(row.memory_mib for row in measured):
        kinds.append(("peak memory, MB", _memory))
    figure = Figure(figsize=(_WIDTH * len(modes), _HEIGHT * len(kinds) + 1), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(kinds), len(modes), squeeze=False)
    for i, (label, values) in enumerate(kinds):
        for j, mode in enumerate(modes):
            rows = [row for row in measured if row.mode == mode]
            _draw(axes[i][j], run, rows, values)
            axes[i][j].set_title(mode if i == 0 else "")
            axes[i][j].set_ylabel(label if j == 0 else "")
            axes[i][j].legend(fontsize="x-small")
    left_out = sorted({row.provider for row in run.rows if row.verdict.startswith("WRONG")})
    wrong = f"; not drawn where WRONG: {', '.join(left_out)}" if left_out else ""
    figure.suptitle(textwrap.fill(f"{run.benchmark} by {run.sweep.x_label}{wrong}", _TITLE_CHARACTERS * len(modes)))
    figure.supxlabel(header(run), fontsize="x-small", wrap=True)
    return figure


def _time(row: Row) -> Values | None:
    return _values(row.device_ms)


def _rate(row: Row) -> Values | None:
    if row.rate is None or row.device_ms is None:
        return None
    work = row.rate * row.device_ms.p50
    return row.rate, work / row.device_ms.p80, work / row.device_ms.p20


def _memory(row: Row) -> Values | None:
    return _values(row.memory_mib)


def _values(value: Quantiles | None) -> Values | None:
    return None if value is None else (value.p50, value.p20, value.p80)


def _numeric(run: Run) -> bool:
    return all(not isinstance(case.position, str) for case in run.sweep.cases)


def _positions(run: Run, rows: Sequence[Row]) -> list[Any]:
    if _numeric(run):
        return [row.case.position for row in rows]
    return [run.sweep.cases.index(row.case) for row in rows]


def _draw(axis: Any, run: Run, rows: Sequence[Row], values: Callable[[Row], Values | None]) -> None:
    providers = list(dict.fromkeys(row.provider for row in run.rows if row.right))
    for i, provider in enumerate(providers):
        found = [(row, value) for row in rows if row.provider == provider and (value := values(row)) is not None]
        xs = _positions(run, [row for row, _ in found])
        middle = [value[0] for _, value in found]
        below = [max(0.0, value[0] - value[1]) for _, value in found]
        above = [max(0.0, value[2] - value[0]) for _, value in found]
        style = {"label": provider, "color": f"C{i}", "capsize": 2}
        if _numeric(run):
            axis.errorbar(xs, middle, yerr=(below, above), marker="o", markersize=3, **style)
        else:
            width = 0.8 / len(providers)
            shifted = [x + (i - (len(providers) - 1) / 2) * width for x in xs]
            axis.bar(shifted, middle, width, yerr=(below, above), **style)
    if values is _rate:
        _draw_ceiling(axis, run, rows)
    else:
        axis.set_yscale("symlog" if values is _memory else "log")
    if values is _time:
        _draw_floor(axis, run, rows)
        _draw_cliffs(axis, run, rows)
    if _numeric(run):
        axis.set_xscale("log", base=2)
    else:
        names = [str(case.position) for case in run.sweep.cases]
        axis.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize="x-small")


def _draw_floor(axis: Any, run: Run, rows: Sequence[Row]) -> None:
    floors = {row.case.name: row for row in rows}.values()
    style = "k--" if _numeric(run) else "k_"
    xs, ys = _positions(run, list(floors)), [row.floor_ms for row in floors]
    axis.plot(xs, ys, style, linewidth=0.8, markersize=24, label="floor")


def _draw_cliffs(axis: Any, run: Run, rows: Sequence[Row]) -> None:
    found = growths(run)
    steep = [row for row in rows if (growth := found.get((row.case.name, row.mode, row.provider))) and growth.cliff]
    if steep:
        ys = [row.device_ms.p50 for row in steep if row.device_ms]
        axis.plot(_positions(run, steep), ys, "o", markersize=11, fillstyle="none", color="r", label="cliff")


def _draw_ceiling(axis: Any, run: Run, rows: Sequence[Row]) -> None:
    for unit, ceiling in (("GB/s", run.ceilings.copy_gbs), ("TFLOP/s", run.ceilings.matmul_tflops)):
        if ceiling is not None and any(row.rate_unit == unit for row in rows):
            axis.axhline(ceiling, color="k", linestyle="--", linewidth=0.8, label=f"ceiling, {unit}")
