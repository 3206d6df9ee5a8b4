"""The page of published times beside predicted ones, from what was predicted last."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path

from npu_offline.timing import constants

from .points import SOURCES
from .predicted import Prediction, Spread, counted, spread, times

RESULTS = Path(__file__).parents[1] / "results" / "points.json"
PAGE = RESULTS.with_name("published_times.md")
_PIPES = {"V": "vector", "S": "scalar", "MTE2": "load (MTE2)", "MTE3": "store (MTE3)"}


def load() -> list[Prediction]:
    """What was predicted last."""
    return [
        Prediction(**{**row, "pipes": {pipe: tuple(found) for pipe, found in row["pipes"].items()}})
        for row in json.loads(RESULTS.read_text())
    ]


_INTRODUCTION = """\
Times that others have published of kernels on Ascend 910B and A3 chips, beside what the
[time model](../docs/pages/tools/time_model.md) predicts of the same kernels: compiled from their own sources at the
commit that was measured, for the chip and shape that was measured, with the L2 cache as the way of measuring leaves it.
None was measured by us. A point counts unless a constant of the model was chosen after it. An error is
|log(predicted / published)|: half and twice are both 100 %."""
_ANEW = """\
`hatch run compare --points` fetches the sources into the cache folder (they are not part of this repository), predicts,
and writes this page; `pip install --no-deps liger-kernel==0.8.5` for Liger's."""
_CONSTANTS_ARE = """\
The numbers of the model that are not of one instruction (`npu_offline.timing.constants`); cycles by vector instruction
stand in `costs.py` (pto-isa) and `register_costs.py` (GE)."""
_CONSTANTS = "name | value | of | source | chip | software | points it was chosen after"
_SUMMARY = "points that count | number | median error | nine of ten within | median of predicted / published"
_SOURCES = "source | repository | published | chip stated | predicted for | software | compiler | L2 cache"
_POINTS = "source | kernel | arguments | commit | published us | predicted us | ratio | pipes: predicted / published"


def rendered(found: Sequence[Prediction]) -> str:
    """The page."""
    low, high = times(found)
    ranges = f"An estimate times {low:.2f} to {high:.2f} has nine of ten published times that count."
    parts = ("# Published times", _INTRODUCTION, ranges, _summary(found), _named(found))
    tables = (
        "## Sources",
        _sources(),
        "## Every point",
        _points(found),
        "## Constants",
        *_constants(),
        "## Made anew",
        _ANEW,
    )
    return "\n\n".join((*parts, *tables)) + "\n"


def _table(head: str, rows: Sequence[str]) -> str:
    return "\n".join((f"| {head} |", f"|{'---|' * (head.count('|') + 1)}", *rows))


def _row(name: str, found: Spread) -> str:
    return f"| {name} | {found.number} | {found.median:.0%} | {found.nine_of_ten:.0%} | {found.bias:.2f} |"


def _summary(found: Sequence[Prediction]) -> str:
    kept = counted(found)
    lines = [_row("**all**", spread(each.ratio for each in kept))]
    for source in dict.fromkeys(each.source for each in kept):
        lines.append(_row(source, spread(each.ratio for each in kept if each.source == source)))
    for pipe, name in _PIPES.items():
        ratios = [
            predicted / published
            for each in found
            for key, (published, predicted, fitted) in each.pipes.items()
            if key == pipe and not fitted and predicted
        ]
        if ratios:
            lines.append(_row(f"{name}, where published", spread(ratios)))
    fitted = [each.ratio for each in found if each.fitted and not each.problem]
    if fitted:
        lines.append(_row("*points that a constant was chosen after*", spread(fitted)))
    return _table(_SUMMARY, lines)


def _named(found: Sequence[Prediction]) -> str:
    missing = [each for each in found if each.problem]
    return f"{len(missing)} points have no prediction; the table says why." if missing else "Every point has a prediction."


def _sources() -> str:
    lines = []
    for name, s in SOURCES.items():
        clock = f", clock assumed to be {s.clock / 1e9:g} GHz" if s.clock else ""
        cells = (name, s.repository, s.where, s.stated, f"{s.chip}{clock}", s.stack, s.toolchain, s.l2)
        lines.append(f"| {' | '.join(cells)} |")
    return _table(_SOURCES, lines)


def _constants() -> tuple[str, str, str]:
    rows = []
    for name, c in constants.constants().items():
        cells = (f"`{name}`", f"{c.value:.4g} {c.unit}", c.meaning, c.source, c.chip, c.stack, ", ".join(c.fitted) or "none")
        rows.append(f"| {' | '.join(cells)} |")
    sources = _table("source | what", [f"| {name} | {text} |" for name, text in constants.SOURCES.items()])
    return _CONSTANTS_ARE, _table(_CONSTANTS, rows), sources


def _points(found: Sequence[Prediction]) -> str:
    lines = []
    for each in found:
        numbers = (f"{each.predicted:.4g}", f"{each.ratio:.2f}{'*' if each.fitted else ''}")
        pipes = [f"{_PIPES[pipe].split()[0]} {b / a:.2f}{'*' if c else ''}" for pipe, (a, b, c) in each.pipes.items()]
        shown = ("", html.escape(each.problem)) if each.problem else numbers
        cells = (each.source, each.kernel, each.arguments, each.commit, f"{each.published:.4g}", *shown, ", ".join(pipes))
        lines.append(f"| {' | '.join(cells)} |")
    return _table(_POINTS, lines) + "\n\n\\* A constant was chosen after this number."
