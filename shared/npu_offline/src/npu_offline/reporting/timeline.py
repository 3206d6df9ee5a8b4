"""Draws a timeline: a row for each pipe of a core, or of a cube core and its vector cores, and a bar for each event."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from ..timing.instructions import unit_of

ROWS = {
    "MTE2": "load",
    "MTE1": "L1 to L0",
    "M": "matrix",
    "FIX": "fixpipe",
    "V": "vector",
    "MTE3": "store",
    "S": "scalar",
}
"""Pipes in the order in which data passes through them, with a description."""
_COLOURS = {
    "MTE2": "#3b7dd8",
    "MTE1": "#2f9aa6",
    "M": "#b8405e",
    "FIX": "#9a8a2f",
    "V": "#3a9b63",
    "MTE3": "#c8792b",
    "S": "#8a63b8",
}
_WIDTH, _LEFT, _HEIGHT, _GAP = 920, 100, 18, 6
_TICKS = 6
_NARROWEST = 0.6  # pixels of a bar, so that it can be seen


def draw(events: Sequence[Sequence[Any]]) -> str:
    """An SVG picture of events, each of them pipe, start, end, name, amount and core; a row for each pipe that has any."""
    shown = [event for event in events if event[0] in ROWS]
    end = max((event[2] for event in shown), default=0) or 1e-9
    scale = (_WIDTH - _LEFT - 10) / end
    cores = sorted({event[5] for event in shown})
    used = {(event[5], event[0]) for event in shown}
    rows = [(core, pipe) for core in cores for pipe in ROWS if (core, pipe) in used]
    bottom = len(rows) * (_HEIGHT + _GAP)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {bottom + 22}" role="img" aria-label="What each pipe does over the first '
        f'{end * 1e6:.1f} microseconds">'
    ]
    for row, (core, pipe) in enumerate(rows):
        does = f"{core} {ROWS[pipe]}" if len(cores) > 1 else ROWS[pipe]
        top = row * (_HEIGHT + _GAP)
        parts.append(f'<text x="0" y="{top + 13}" font-size="12" class="pipe">{does}</text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH - _LEFT - 10}" height="{_HEIGHT}" fill="#888" fill-opacity=".12"/>'
        )
        for _, start, stop, name, amount, _ in (event for event in shown if (event[5], event[0]) == (core, pipe)):
            left, width = _LEFT + start * scale, max((stop - start) * scale, _NARROWEST)
            title = f"{name}, {amount} {unit_of(pipe)}, {(stop - start) * 1e6:.2f} µs"
            parts.append(
                f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_HEIGHT}" fill="{_COLOURS[pipe]}">'
                f"<title>{escape(title)}</title></rect>"
            )
    for tick in range(_TICKS + 1):
        x = _LEFT + tick * (_WIDTH - _LEFT - 10) / _TICKS
        anchor = "start" if tick == 0 else "end" if tick == _TICKS else "middle"
        label = f"{tick * end / _TICKS * 1e6:.1f} µs"
        parts.append(
            f'<text x="{x:.0f}" y="{bottom + 14}" font-size="11" class="tick" text-anchor="{anchor}">{label}</text>'
        )
    return "".join([*parts, "</svg>"])
