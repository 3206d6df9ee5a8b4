"""The flowcharts of ARCHITECTURE.md as SVG: GitHub draws them with Mermaid, which a page would fetch from elsewhere."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence

BLOCK = re.compile(r"```mermaid\nflowchart TD\n(?P<edges>.*?)```", re.S)
ROW, GAP, BOX = 86, 18, 30


def ranks(edges: Sequence[tuple[str, str]]) -> list[list[str]]:
    """Boxes by rows: each is above all that it points to."""
    below = {one: [to for start, to in edges if start == one] for edge in edges for one in edge}

    def height(box: str) -> int:
        return 1 + max(map(height, below[box]), default=-1)

    heights = {box: height(box) for box in below}
    return [sorted(box for box in below if heights[box] == level) for level in range(max(heights.values()), -1, -1)]


def draw(edges: Sequence[tuple[str, str]]) -> str:
    """Rows of boxes, an arrow from each box to what it uses."""
    rows = ranks(edges)
    sizes = {box: 9 * len(box) + 18 for row in rows for box in row}
    width = max(sum(sizes[box] + GAP for box in row) + GAP for row in rows)
    places: dict[str, tuple[float, float]] = {}
    for number, row in enumerate(rows):
        spare = (width - sum(sizes[box] for box in row)) / (len(row) + 1)
        left = spare
        for box in row:
            places[box] = (left + sizes[box] / 2, 10 + number * ROW)
            left += sizes[box] + spare
    parts = [_arrow(places[one], places[to]) for one, to in edges]
    parts += [_box(box, places, sizes) for box in sizes]
    height = 20 + (len(rows) - 1) * ROW + BOX
    head = '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    head += '<path class="head" d="M0 0L8 4L0 8z"/></marker></defs>'
    label = html.escape("; ".join(f"{one} uses {to}" for one, to in edges))
    shape = f'viewBox="0 0 {width:.0f} {height}" style="max-width:{width:.0f}px;min-width:{min(width, 640):.0f}px"'
    return f'<div class="wide"><svg class="graph" {shape} role="img" aria-label="{label}">{head}{"".join(parts)}</svg></div>'


def _box(box: str, places: Mapping[str, tuple[float, float]], sizes: Mapping[str, int]) -> str:
    x, y = places[box]
    rectangle = f'<rect x="{x - sizes[box] / 2:.1f}" y="{y}" width="{sizes[box]}" height="{BOX}" rx="4"/>'
    return f'{rectangle}<text x="{x:.1f}" y="{y + 20}" text-anchor="middle">{html.escape(box)}</text>'


def _arrow(one: tuple[float, float], to: tuple[float, float]) -> str:
    (x, y), (end, bottom) = one, to
    y += BOX
    middle = (y + bottom) / 2
    curve = f"M{x:.1f} {y}C{x:.1f} {middle} {end:.1f} {middle} {end:.1f} {bottom}"
    return f'<path class="edge" marker-end="url(#arrow)" d="{curve}"/>'


def replace(text: str) -> str:
    """The text with its flowcharts drawn."""
    return BLOCK.sub(lambda found: draw(re.findall(r"(\w+) --> (\w+)", found["edges"])), text)
