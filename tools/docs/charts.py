"""Charts as SVG that stands in a page and takes its colours from it: shares of the limit, from benchmark records."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.workspace import ROOT

WIDTH, HEIGHT = 400, 290
LEFT, RIGHT, TOP, BOTTOM = 56, 18, 34, 64
PICTURE = ROOT / "tools" / "docs" / "shares.svg"
PREDICTED = ROOT / "tools" / "results" / "ascend.json"
PREDICTED_PICTURE = ROOT / "tools" / "docs" / "ascend.svg"
PROVIDERS = {"ours": "this", "torch": "torch", "compile": "torch.compile", "liger": "liger-kernel"}
"""Which providers are drawn, in this order, and what they are called."""


@dataclass(frozen=True)
class Line:
    """One line of a plot.

    Attributes:
        name: in the key.
        style: the class that colours it.
        points: x, y and what a pointer over the point shows; without a text, no circle is drawn.
    """

    name: str
    style: str
    points: Sequence[tuple[float, float, str]]


def plot(lines: Sequence[Line], title: str, x_ticks: dict[float, str], y_ticks: dict[float, str], x_label: str = "") -> str:
    """Lines over two linear axes, which end at the outermost ticks."""

    def across(x: float) -> float:
        return LEFT + (x - min(x_ticks)) / (max(x_ticks) - min(x_ticks)) * (WIDTH - LEFT - RIGHT)

    def down(y: float) -> float:
        return TOP + (max(y_ticks) - y) / (max(y_ticks) - min(y_ticks)) * (HEIGHT - TOP - BOTTOM)

    parts = [_text("title", LEFT, 18, title)]
    for y, text in y_ticks.items():
        parts.append(f'<path class="grid" d="M{LEFT} {down(y):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(_text("tick", LEFT - 6, down(y) + 4, text, "end"))
    for x, text in x_ticks.items():
        parts.append(f'<path class="grid" d="M{across(x):.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
        parts.append(_text("tick", across(x), HEIGHT - BOTTOM + 16, text, "middle"))
    parts.append(_text("tick", WIDTH - RIGHT, HEIGHT - BOTTOM + 32, x_label, "end"))
    left, bottom = 12, HEIGHT - 14 if sum(36 + 7 * len(line.name) for line in lines) < WIDTH else HEIGHT - 26
    for line in lines:
        path = "L".join(f"{across(x):.1f} {down(y):.1f}" for x, y, _ in line.points)
        parts.append(f'<path class="line {line.style}" d="M{path}"/>')
        parts += [
            f'<circle class="{line.style}" cx="{across(x):.1f}" cy="{down(y):.1f}" r="2.6">'
            f"<title>{html.escape(tip)}</title></circle>"
            for x, y, tip in line.points
            if tip
        ]
        width = 36 + 7 * len(line.name)
        if left + width > WIDTH:
            left, bottom = 12, bottom + 16
        parts.append(f'<path class="line {line.style}" d="M{left} {bottom - 4}h18"/>')
        parts.append(_text("tick", left + 23, bottom, line.name))
        left += width
    return picture(WIDTH, HEIGHT, f"{title}, over {x_label}" if x_label else title, parts)


def picture(width: float, height: float, label: str, parts: Sequence[str], style: str = "") -> str:
    """The SVG of these parts."""
    head = f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(label)}"'
    return f"{head}{style}>{''.join(parts)}</svg>"


def _text(kind: str, x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def read(file: Path) -> list[dict[str, Any]]:
    """The records of a history."""
    records: list[dict[str, Any]] = json.loads(file.read_text())
    return records


def floors(table: Path) -> dict[str, list[float]]:
    """The least milliseconds of each case, by mode, from the table that npu-bench wrote in the same run."""
    found: dict[str, list[float]] = {}
    for mode, body in re.findall(r"^\*\*\w+, ([\w-]+)\*\*$(.*?)(?=^\*\*|\Z)", table.read_text(), re.M | re.S):
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in body.splitlines() if line.startswith("|")]
        column = rows[0].index("floor ms")
        found[mode] = list(
            {row[0]: float(row[column]) for row in rows[2:] if row[column : column + 1] not in ([], ["-"])}.values()
        )
    return found


def sweeps(file: Path) -> list[tuple[str, str]]:
    """Sweep and mode of every chart that there is to draw: there is a table of the sweep."""
    pairs = [(r["x_name"], r["kernel_operation_mode"]) for r in read(file) if r["metric_name"] == "speed"]
    numeric = [pair for pair in dict.fromkeys(pairs) if pair[0] not in ("case", "model", "head")]
    return [(sweep, mode) for sweep, mode in numeric if file.with_name(f"{sweep}.md").exists()]


def shares(file: Path, sweep: str, mode: str) -> tuple[list[Line], dict[str, Any]]:
    """Of the latest run of a sweep each provider's share of the limit over log x, and the record of ours."""
    chosen = [r for r in read(file) if (r["metric_name"], r["x_name"], r["kernel_operation_mode"]) == ("speed", sweep, mode)]
    latest = {record["kernel_provider"]: record for record in sorted(chosen, key=lambda record: record["timestamp"])}
    run, least = latest["ours"], floors(file.with_name(f"{sweep}.md"))[mode]
    lines = []
    for provider, name in PROVIDERS.items():
        # Another run's numbers are another clock's: only what ran beside ours is drawn.
        if provider in latest and latest[provider]["version"] == run["version"]:
            times = zip(latest[provider]["x_values"], latest[provider]["y_values_50"], least, strict=True)
            points = [
                (math.log(x), floor / ms, f"{name}, {_short(x)}: {floor / ms:.0%} of the limit, {ms:.3g} ms")
                for x, ms, floor in times
                if ms is not None
            ]
            lines.append(Line(name, provider, points))
    return lines, run


def _short(x: float) -> str:
    return f"{x / 1024:g}k" if x >= 8192 and x % 1024 == 0 else f"{x:g}"


def draw(lines: Sequence[Line], title: str, run: dict[str, Any]) -> str:
    """Shares of the limit from 0 to 100 %, or more where caches make it more."""
    points = sorted(run["x_values"])
    step = max(1, math.ceil((len(points) - 1) / 5))  # at most six, the first and the last too
    x_ticks = {math.log(x): _short(x) for x in {points[0], *points[::-1][::step]}}
    top = max(4, *(math.ceil(y * 4) for line in lines for _, y, _ in line.points))
    return plot(lines, title, x_ticks, {quarter / 4: f"{quarter * 25} %" for quarter in range(top + 1)}, run["x_label"])


def figures(file: Path) -> str:
    """All charts of a history, with what was measured where."""
    drawn, said, recorded = [], [], []
    for sweep, mode in sweeps(file):
        lines, run = shares(file, sweep, mode)
        drawn.append(draw(lines, f"{mode}, over {sweep}", run))
        known = json.loads(run["extra_benchmark_config_str"])
        versions = ", ".join(
            f"{name} {known[name]}" for name in ("torch", "triton", "CUDA", "liger-kernel") if name in known
        )
        said.append(f"{run['gpu_name']}, {versions}, {run['timestamp'][:10]}")
        recorded.append(run["version"])
    below = (
        f"Shares of the limit by medians of device time, cold cache. {'; '.join(dict.fromkeys(said))}. {_clean(recorded)}"
    )
    return f'<div class="charts" markdown="0">{"".join(drawn)}</div>\n\n*{below}*\n'


def _clean(versions: Sequence[str]) -> str:
    """From which tree records are."""
    names = ", ".join(f"`{version}`" for version in dict.fromkeys(versions))
    if any("dirty" in version or "unversioned" in version for version in versions):
        return f"The trees that were measured were no commits: {names}."
    return f"Recorded as {names}."


_STYLE = (
    "<style>text{font:12px sans-serif;fill:#777}.name{font-weight:600}.grid{stroke:#9996;fill:none}"
    ".ours{fill:#00796b}.torch{fill:#d9793f}.liger{fill:#5b86e5}"
    ".range{stroke:#777;stroke-width:2;fill:none}</style>"
)


Bar = tuple[str, float, tuple[float, float] | None, str]
"""Style, share of the limit, its range, and what stands behind it."""


def bars(readme: str, *, alone: bool = False) -> str:
    """The shares of the limit in the table of the README's section "Results", a bar for each of its columns.

    Args:
        readme: the text; a row has a name, or none below its forward, the pass, milliseconds or dashes, and the limit's.
        alone: with colours, for a file apart from a page.
    """
    table = re.search(r"\n## Results\n.*?\n(\|.*?)\n\n", readme, re.S)
    assert table, "the README has a table of results"
    groups: list[tuple[str, str, list[Bar]]] = []
    name = ""
    for line in table[1].splitlines()[2:]:
        label, mode, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        name = label or name
        *measured, limit = [re.search(r"\d*\.\d+", cell) for cell in cells]
        assert limit, line
        shares_of = [
            (style, float(limit[0]) / float(time[0]))
            for style, time in zip(("ours", "torch", "liger"), measured, strict=True)
            if time
        ]
        drawn: list[Bar] = [(style, share, None, f"{share:.0%} {PROVIDERS[style]}") for style, share in shares_of]
        groups.append((name.partition(",")[0], mode, drawn))
    return _bars(groups, "Share of the limit of an NVIDIA H200: this project, torch and liger-kernel", alone)


NAMES = {
    "rms_norm": "RMSNorm",
    "embedding": "Embedding",
    "attn_res": "Attention Residuals",
    "fused_linear_cross_entropy": "Cross entropy",
}


def predicted_bars(file: Path, *, alone: bool = False) -> str:
    """What `hatch run compare --json` wrote, the largest size of each operator: share of the limit, and bytes."""
    groups = []
    rows = read(file)
    for operator, direction in dict.fromkeys((row["operator"], row["direction"]) for row in rows):
        chosen = [row for row in rows if (row["operator"], row["direction"]) == (operator, direction)]
        size = max(row["size"] for row in chosen)
        drawn: list[Bar] = []
        for row in (row for row in chosen if row["size"] == size):
            style = row["whose"]
            low, high = sorted(1 / multiple for multiple in row["range_over_floor"])
            share = 1 / row["kernels_over_floor"]
            text = f"{share:.0%} {'this' if style == 'ours' else style}, {row['moved'] / row['fewest']:.2f}x bytes"
            drawn.append((style, share, (low, high), text))
        mode = direction if direction != "full" else "one pass over the logits"
        groups.append((NAMES[operator], mode, drawn))
    label = "Predicted share of the limit of an Ascend 910B4, and bytes over the fewest: this project and liger-kernel"
    return _bars(groups, label, alone)


def shares_right(table: str) -> str:
    """A bar for each row of a table of packages: how many of its calls are right."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    counts = [(name, int(calls), int(right)) for name, calls, right, *_ in rows]
    groups: list[tuple[str, str, list[Bar]]] = [
        (name, f"{calls} calls", [("ours", right / calls, None, f"{right} right")]) for name, calls, right in counts
    ]
    return _bars(groups, "Calls of each package that are right")


def _bars(groups: Sequence[tuple[str, str, Sequence[Bar]]], label: str, alone: bool = False) -> str:
    left = max(136.0, max(7.4 * len(name) for name, *_ in groups))
    right, bar, gap = left + 146, 14, 16
    to: Callable[[float], float] = lambda share: left + min(share, 1.0) * (right - left)  # noqa: E731
    parts = [_STYLE] if alone else []
    top = 28.0
    for name, mode, drawn in groups:
        parts.append(_text("tick name", left - 8, top + 11, name, "end"))
        parts.append(_text("tick", left - 8, top + 26, mode, "end"))
        for i, (style, share, reach, text) in enumerate(drawn):
            y = top + i * bar
            parts.append(f'<rect class="{style}" x="{left}" y="{y}" width="{to(share) - left:.1f}" height="{bar - 2}"/>')
            end = to(share)
            if reach:
                low, end = map(to, reach)
                parts.append(f'<path class="range" d="M{low:.1f} {y + bar / 2 - 1}H{end:.1f}"/>')
            parts.append(_text("tick", end + 5, y + bar - 3, text))
        top += max(2 * bar, len(drawn) * bar) + gap
    grid = [
        part
        for share in (0.0, 0.5, 1.0)
        for part in (
            f'<path class="grid" d="M{to(share):.1f} 20V{top - gap / 2}"/>',
            _text("tick", to(share), 14, f"{share:.0%}", "middle"),
        )
    ]
    return picture(
        left + 294, top - gap / 2 + 4, label, [*grid, *parts], ' xmlns="http://www.w3.org/2000/svg"' if alone else ""
    )
