"""Predicted over published times, as SVG that stands in a page: both axes logarithmic, a colour for each source."""

from __future__ import annotations

import html
import json
import math
from pathlib import Path
from typing import Any

_COLOURS = (
    *("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9"),
    *("#8c7a00", "#7f7f7f", "#9467bd", "#b22222", "#2f4f4f", "#ff69b4"),
)
_WIDTH, _HEIGHT = 720, 560
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 550, 16, 510
_POWERS = range(5)  # of ten microseconds


def figure(file: Path) -> str:
    """A circle for each prediction, hollow where it does not count; a line where predicted and published are equal."""
    found: list[dict[str, Any]] = json.loads(file.read_text())
    colours = dict(zip(dict.fromkeys(each["source"] for each in found), _COLOURS, strict=True))
    parts = [*_grid(), *(_circle(each, colours[each["source"]]) for each in found if not each["problem"])]
    for number, (source, colour) in enumerate(colours.items()):
        y = _TOP + 14 + 20 * number
        parts.append(f'<circle cx="{_RIGHT + 20}" cy="{y - 4}" r="4" fill="{colour}"/>')
        parts.append(f'<text class="tick" x="{_RIGHT + 32}" y="{y}">{source}</text>')
    y = _TOP + 14 + 20 * len(colours)
    parts.append(f'<text class="tick" x="{_RIGHT + 14}" y="{y}">hollow: does not count</text>')
    label = "Predicted over published microseconds, both axes logarithmic"
    head = f'<svg class="chart scatter" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">'
    return f'<div class="wide" markdown="0">{head}{"".join(parts)}</svg></div>'


def _across(microseconds: float) -> float:
    return _LEFT + math.log10(microseconds) / _POWERS[-1] * (_RIGHT - _LEFT)


def _up(microseconds: float) -> float:
    return _BOTTOM - math.log10(microseconds) / _POWERS[-1] * (_BOTTOM - _TOP)


def _grid() -> list[str]:
    parts = [f'<path class="grid" d="M{_LEFT} {_BOTTOM}L{_RIGHT} {_TOP}" stroke-dasharray="5 4"/>']
    for power in _POWERS:
        x, y, text = _across(10.0**power), _up(10.0**power), f"{10**power:,}"
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_RIGHT}M{x:.1f} {_TOP}V{_BOTTOM}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{_BOTTOM + 16}" text-anchor="middle">{text}</text>')
    parts.append(f'<text class="tick" x="{_RIGHT}" y="{_BOTTOM + 36}" text-anchor="end">published us</text>')
    parts.append(f'<text class="tick" x="{_LEFT + 6}" y="{_TOP + 12}">predicted us</text>')
    return parts


def _circle(each: dict[str, Any], colour: str) -> str:
    published, predicted = each["published"], each["predicted"]
    about = (
        f"{each['source']}, {each['kernel']} {each['arguments']}: {published:.4g} published, {predicted:.4g} us predicted"
    )
    fill = "none" if each["fitted"] else colour
    place = f'cx="{_across(published):.1f}" cy="{_up(predicted):.1f}"'
    return f'<circle {place} r="4" fill="{fill}" stroke="{colour}"><title>{html.escape(about)}</title></circle>'
