"""Charts of training runs, from the records of `hatch run convergence`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .charts import Line, plot

RUNS = {
    "plain PyTorch": "torch",
    "plain PyTorch, other order": "other",
    "our operators": "ours",
    "our operators, compiled": "compiled",
}
"""The runs that are drawn, and the class that colours each."""


def draw(curves: Sequence[dict[str, Any]], title: str, every: int) -> str:
    """The loss on held-out text over steps, a line for each run."""
    lines = [Line(c["name"], RUNS[c["name"]], [(i, loss, "") for i, loss in enumerate(c["held_out"])]) for c in curves]
    losses = [loss for curve in curves for loss in curve["held_out"]]
    low, high, last = min(losses), max(losses), len(curves[0]["held_out"]) - 1
    steps = {point: str(every * (point + 1)) for point in (round(part * last / 4) for part in range(5))}
    return plot(lines, title, steps, {loss: f"{loss:.2f}" for loss in (low + part * (high - low) / 4 for part in range(5))})


def figures(file: Path) -> str:
    """All precisions of a record, with what was trained where."""
    run = json.loads(file.read_text())
    every, model = run["measured_every"], run["setup"]["model"]
    drawn = "".join(draw(curves, f"{precision}, loss over steps", every) for precision, curves in run["curves"].items())
    said = (
        f"{run['device']}, torch {run['torch']}, {run['date']}; {model['layers']} layers of {model['hidden_size']} columns"
    )
    return f'<div class="charts" markdown="0">{drawn}</div>\n\n*{said}. The loss is that of text that is not trained on.*\n'
