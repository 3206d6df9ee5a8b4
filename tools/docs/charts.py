"""Charts of benchmark records, as SVG that stands in a page and takes its colours from it, light or dark."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 400, 290
LEFT, RIGHT, TOP, BOTTOM = 68, 18, 34, 64
PROVIDERS = {"ours": "this", "torch": "torch", "compile": "torch.compile", "liger": "liger-kernel"}
"""Which providers are drawn, in this order, and what they are called."""


@dataclass(frozen=True)
class Series:
    """One line: a provider's times over a sweep; None where it was wrong or not available."""

    provider: str
    x: Sequence[float | str]
    y: Sequence[float | None]


def read(file: Path) -> list[dict[str, Any]]:
    """The records of a history."""
    records: list[dict[str, Any]] = json.loads(file.read_text())
    return records


def sweeps(records: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Sweep and mode of every chart that there is to draw."""
    pairs = [(r["x_name"], r["kernel_operation_mode"]) for r in records if r["metric_name"] == "speed"]
    return [pair for pair in dict.fromkeys(pairs) if pair[0] not in ("case", "model", "head")]


def select(records: Sequence[dict[str, Any]], sweep: str, mode: str) -> tuple[list[Series], dict[str, Any]]:
    """Of the latest run of a sweep the device times of each provider, and the record of ours."""
    chosen = [
        record
        for record in records
        if record["metric_name"] == "speed" and (record["x_name"], record["kernel_operation_mode"]) == (sweep, mode)
    ]
    latest = {record["kernel_provider"]: record for record in sorted(chosen, key=lambda record: record["timestamp"])}
    run = latest["ours"]
    series = [
        Series(provider, latest[provider]["x_values"], latest[provider]["y_values_50"])
        for provider in PROVIDERS
        # Another run's numbers are another clock's: only what ran beside ours is drawn.
        if provider in latest and latest[provider]["version"] == run["version"]
    ]
    return series, run


def draw(series: Sequence[Series], title: str, x_label: str) -> str:
    """A line for each provider, both axes logarithmic."""
    points = {float(x) for each in series for x in each.x}
    times = [y for each in series for y in each.y if y is not None]
    low_x, high_x = math.log(min(points)), math.log(max(points))
    low_y, high_y = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))

    def across(x: float) -> float:
        return LEFT + (math.log(x) - low_x) / (high_x - low_x) * (WIDTH - LEFT - RIGHT)

    def down(y: float) -> float:
        return TOP + (high_y - math.log10(y)) / (high_y - low_y) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<text class="title" x="{LEFT}" y="18">{html.escape(title)}</text>']
    for power in range(low_y, high_y + 1):
        y = down(10.0**power)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g} ms</text>')
    for x in _ticks(sorted(points)):
        parts.append(f'<path class="grid" d="M{across(x):.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
        place = f'x="{across(x):.1f}" y="{HEIGHT - BOTTOM + 16}"'
        parts.append(f'<text class="tick" {place} text-anchor="middle">{_short(x)}</text>')
    parts.append(
        f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - BOTTOM + 32}" text-anchor="end">{html.escape(x_label)}</text>'
    )
    for each in series:
        pairs = [(float(x), y) for x, y in zip(each.x, each.y, strict=True) if y is not None]
        path = "L".join(f"{across(x):.1f} {down(y):.1f}" for x, y in pairs)
        parts.append(f'<path class="line {each.provider}" d="M{path}"/>')
        parts += [
            f'<circle class="{each.provider}" cx="{across(x):.1f}" cy="{down(y):.1f}" r="2.6">'
            f"<title>{html.escape(PROVIDERS[each.provider])}, {_short(x)}: {y:.3g} ms</title></circle>"
            for x, y in pairs
        ]
    left = LEFT
    for each in series:
        name, y = PROVIDERS[each.provider], HEIGHT - 14
        parts.append(f'<path class="line {each.provider}" d="M{left} {y - 4}h18"/>')
        parts.append(f'<text class="tick" x="{left + 23}" y="{y}">{html.escape(name)}</text>')
        left += 36 + 7 * len(name)
    label = html.escape(f"{title}: milliseconds over {x_label}")
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _ticks(points: Sequence[float]) -> Sequence[float]:
    """At most six of them, the first and the last too."""
    step = max(1, math.ceil((len(points) - 1) / 5))
    return list(reversed(list(reversed(points))[::step]))


def _short(x: float) -> str:
    return f"{x / 1024:g}k" if x >= 8192 and x % 1024 == 0 else f"{x:g}"


def figures(file: Path) -> str:
    """All charts of a history, with what was measured where."""
    records = read(file)
    drawn, said, recorded = [], [], []
    for sweep, mode in sweeps(records):
        series, run = select(records, sweep, mode)
        drawn.append(draw(series, f"{mode}, over {sweep}", run["x_label"]))
        known = json.loads(run["extra_benchmark_config_str"])
        versions = ", ".join(
            f"{name} {known[name]}" for name in ("torch", "triton", "CUDA", "liger-kernel") if name in known
        )
        said.append(f"{run['gpu_name']}, {versions}, {run['timestamp'][:10]}")
        recorded.append(f"`{run['version']}`")
    below = f"{'; '.join(dict.fromkeys(said))}; recorded as {', '.join(dict.fromkeys(recorded))}"
    return f'<div class="charts" markdown="0">{"".join(drawn)}</div>\n\n*Medians of device time, cold cache. {below}.*\n'
