"""Charts of training runs, from the records of `hatch run convergence`."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH

RUNS = {
    "plain PyTorch": "torch",
    "plain PyTorch, other order": "other",
    "our operators": "ours",
    "our operators, compiled": "compiled",
}
"""The runs that are drawn, and the class that colours each."""


def draw(curves: Sequence[dict[str, Any]], title: str, every: int) -> str:
    """The loss on held-out text over steps, a line for each run."""
    losses = [loss for curve in curves for loss in curve["held_out"]]
    low, high, last = min(losses), max(losses), len(curves[0]["held_out"]) - 1

    def across(point: int) -> float:
        return LEFT + point / last * (WIDTH - LEFT - RIGHT)

    def down(loss: float) -> float:
        return TOP + (high - loss) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<text class="title" x="{LEFT}" y="18">{html.escape(title)}</text>']
    for part in range(5):
        loss, point = low + part * (high - low) / 4, round(part * last / 4)
        parts.append(f'<path class="grid" d="M{LEFT} {down(loss):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{down(loss) + 4:.1f}" text-anchor="end">{loss:.2f}</text>')
        place = f'x="{across(point):.1f}" y="{HEIGHT - BOTTOM + 16}"'
        parts.append(f'<text class="tick" {place} text-anchor="middle">{every * (point + 1)}</text>')
    for curve in curves:
        points = (f"{across(i):.1f} {down(loss):.1f}" for i, loss in enumerate(curve["held_out"]))
        parts.append(f'<path class="line {RUNS[curve["name"]]}" d="M{"L".join(points)}"/>')
    for number, curve in enumerate(curves):
        left, y = LEFT - 44 + 172 * (number % 2), HEIGHT - 26 + 16 * (number // 2)
        parts.append(f'<path class="line {RUNS[curve["name"]]}" d="M{left} {y - 4}h16"/>')
        parts.append(f'<text class="tick" x="{left + 20}" y="{y}">{html.escape(curve["name"])}</text>')
    label = html.escape(f"{title}: loss on held-out text over steps")
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def figures(file: Path) -> str:
    """All precisions of a record, with what was trained where."""
    run = json.loads(file.read_text())
    every, model = run["measured_every"], run["setup"]["model"]
    drawn = "".join(draw(curves, f"{precision}, loss over steps", every) for precision, curves in run["curves"].items())
    said = (
        f"{run['device']}, torch {run['torch']}, {run['date']}; {model['layers']} layers of {model['hidden_size']} columns"
    )
    return f'<div class="charts" markdown="0">{drawn}</div>\n\n*{said}. The loss is that of text that is not trained on.*\n'
