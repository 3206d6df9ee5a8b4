"""Draws the Unified Buffer over time: addresses by instructions, a rectangle for each life of a buffer, findings marked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from ..errors import OfflineError
from ..launches import Access, Launch

_COLOURS = ("#3b7dd8", "#3a9b63", "#c8792b", "#8a63b8", "#2f9aa6", "#9a8a2f", "#7a8794", "#b86f9e")
_MARK = "#d11f2f"
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 1000, 420, 70, 40
_INCHES = (14, 6)
_NAMED = 0.04  # of the picture's width and height: smaller buffers have no room for their name


@dataclass
class Life:
    """A buffer from its first write to the last access before it is written anew.

    Attributes:
        buffer: its name.
        core: that it lies on.
        low, high: its bytes.
        first, last: steps.
        instructions: that access it, in order.
        findings: numbers of the launch's findings that name it.
    """

    buffer: str
    core: int
    low: int
    high: int
    first: int
    last: int
    instructions: list[str] = field(default_factory=list)
    findings: list[int] = field(default_factory=list)


def lives(launch: Launch) -> list[Life]:
    """The lives of all buffers that the first program of a launch uses, with the findings that name them."""
    found: list[Life] = []
    current: dict[tuple[int, str], Life] = {}
    was_read: set[tuple[int, str]] = set()
    for access in launch.accesses:
        key = (access.core, access.buffer)
        if key not in current or (access.writes and key in was_read and not _is_in_place(access, current[key])):
            current[key] = Life(access.buffer, access.core, access.low, access.high, access.step, access.step)
            found.append(current[key])
            was_read.discard(key)
        if not access.writes:
            was_read.add(key)
        current[key].last = access.step
        if access.instruction not in current[key].instructions:
            current[key].instructions.append(access.instruction)
    for number, finding in enumerate(launch.notes, 1):
        instructions, buffers = set(re.findall(r"\w+#\d+", finding.text)), set(re.findall(r"buffer \d+", finding.text))
        for life in found:
            if instructions & set(life.instructions) and (not buffers or _short(life) in buffers):
                life.findings.append(number)
    return found


def draw(launch: Launch) -> str:
    """An SVG picture; a rectangle's title says what it is."""
    shown = lives(launch)
    steps, end = _extent(launch.accesses)
    across, up = (_WIDTH - _LEFT - 10) / steps, (_HEIGHT - _BOTTOM - 10) / end
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="The Unified Buffer of {escape(launch.kernel)}">']
    for tick in range(5):
        x, y = _LEFT + tick * steps / 4 * across, _HEIGHT - _BOTTOM - tick * end / 4 * up
        parts.append(f'<text x="{x:.0f}" y="{_HEIGHT - 20}" font-size="11" text-anchor="middle">{tick * steps // 4}</text>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.0f}" font-size="11" text-anchor="end">{tick * end // 4:,}</text>')
    parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 4}" font-size="11" text-anchor="middle">instructions</text>')
    for life in sorted(shown, key=lambda life: bool(life.findings)):
        x, y = _LEFT + life.first * across, _HEIGHT - _BOTTOM - life.high * up
        width, height = max((life.last - life.first + 1) * across, 1), max((life.high - life.low) * up, 1)
        edge = f'stroke="{_MARK}" stroke-width="2"' if life.findings else 'stroke="#fff" stroke-width=".4"'
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        title = f"<title>{escape(_title(life))}</title>"
        parts.append(f'<rect {place} fill="{_colour(life)}" fill-opacity=".7" {edge}>{title}</rect>')
    return "".join([*parts, "</svg>"])


def save(launch: Launch, path: Path) -> None:
    """The same picture as a PNG file.

    Raises:
        OfflineError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError:
        raise OfflineError("pictures need matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=_INCHES, layout="constrained")
    axes = figure.subplots()
    for life in sorted(lives(launch), key=lambda life: bool(life.findings)):
        edge, line = (_MARK, 2.0) if life.findings else ("white", 0.3)
        corner, width = (life.first, life.low), life.last - life.first + 1
        axes.add_patch(
            Rectangle(
                corner, width, life.high - life.low, facecolor=_colour(life), edgecolor=edge, linewidth=line, alpha=0.8
            )
        )
        for number in life.findings:
            axes.annotate(str(number), (life.first, life.high), color=_MARK)
    steps, end = _extent(launch.accesses)
    named: set[str] = set()
    for life in lives(launch):
        is_wide, is_high = life.last - life.first > steps * _NAMED, life.high - life.low > end * _NAMED
        if is_wide and is_high and life.buffer not in named:
            axes.annotate(
                _short(life), ((life.first + life.last + 1) / 2, (life.low + life.high) / 2), ha="center", va="center"
            )
            named.add(life.buffer)
    axes.set(xlim=(0, steps), ylim=(0, end), xlabel="instructions of the first program", ylabel="byte of the Unified Buffer")
    axes.set_title(f"{launch.kernel}: {len(launch.notes)} findings")
    figure.savefig(path, dpi=110)


def page(pictures: Sequence[tuple[str, Launch]]) -> str:
    """An HTML page of pictures, each with a title, and of the findings of its launch."""
    parts = ["<!doctype html><meta charset='utf-8'><title>The Unified Buffer over time</title>"]
    parts.append(
        "<style>body{font:14px sans-serif;margin:2em;max-width:1040px}svg{background:#f4f4f4}li{color:#d11f2f}</style>"
    )
    parts.append("<h1>The Unified Buffer over time</h1>")
    parts.append(
        "<p>Across: the instructions of the first program, in the order in which they were performed. Up: addresses. A "
        "rectangle is a buffer from its first write to its last access; a finding names the red ones.</p>"
    )
    for title, launch in pictures:
        found = "".join(f"<li>{escape(str(finding))}</li>" for finding in launch.notes)
        parts.append(f"<h2>{escape(title)}</h2>{draw(launch)}<ol>{found}</ol>")
    return "\n".join(parts)


def _short(life: Life) -> str:
    return life.buffer.partition(" (")[0]


def _is_in_place(access: Access, life: Life) -> bool:
    return access.step == life.last


def _extent(accesses: Sequence[Access]) -> tuple[int, int]:
    return max(access.step for access in accesses) + 1, max(access.high for access in accesses)


def _colour(life: Life) -> str:
    return _COLOURS[int(_short(life).partition(" ")[2]) % len(_COLOURS)]


def _title(life: Life) -> str:
    marks = f", findings {', '.join(map(str, life.findings))}" if life.findings else ""
    where = f"{life.buffer}, bytes {life.low} to {life.high}, steps {life.first} to {life.last}"
    return f"{where}: {' '.join(life.instructions)}{marks}"
