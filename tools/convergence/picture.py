"""The curves of each precision, and how far each is from plain PyTorch beside how far it may be, as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from .band import band, differences
from .runs import EVERY, Curve

_PLAIN, _OTHER, _OURS = "#b8c4d6", "#444444", ("#c0392b", "#e39b2e", "#2e7d5b")
_RESOLUTION = 1e-7  # a difference of zero has no place on a logarithmic axis: it is drawn below what fp32 can show


def save(path: Path, curves: Mapping[str, Sequence[Curve]], title: str) -> None:
    """Write the picture.

    Args:
        path: its ending is the format.
        curves: of each precision: the plain run, the plain run with another order of the data, and ours.
        title: above all.
    """
    size = (4.6 * len(curves), 6)
    figure, axes = plt.subplots(2, len(curves), sharex=True, squeeze=False, figsize=size, layout="constrained")
    figure.suptitle(title, fontsize=10)
    for (precision, (plain, other, *ours)), (top, bottom) in zip(curves.items(), axes.T, strict=True):
        steps = [(i + 1) * EVERY for i in range(len(plain.held_out))]
        top.set_title(precision)
        top.plot(steps, plain.held_out, color=_PLAIN, linewidth=5, label=plain.name)
        top.plot(steps, other.held_out, color=_OTHER, linewidth=1, linestyle=":", label=other.name)
        allowed = band(plain, other)
        bottom.fill_between(steps, [_RESOLUTION / 2] * len(steps), allowed, color=_PLAIN, alpha=0.5, label="band")
        bottom.plot(steps, _shown(differences(other, plain)), color=_OTHER, linewidth=1, linestyle=":", label=other.name)
        for curve, color in zip(ours, _OURS, strict=False):
            top.plot(steps, curve.held_out, color=color, linewidth=1.2, label=curve.name)
            bottom.plot(steps, _shown(differences(curve, plain)), color=color, linewidth=1.2, label=curve.name)
        bottom.set_yscale("log")
        bottom.set_ylim(bottom=_RESOLUTION / 2)
        bottom.set_xlabel("step")
        for place in (top, bottom):
            _tidy(place)
    axes[0, 0].set_ylabel("held-out loss, nats per byte")
    axes[1, 0].set_ylabel("difference from plain PyTorch, nats")
    axes[0, -1].legend(frameon=False, fontsize=8)
    axes[1, -1].legend(frameon=False, fontsize=8, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _shown(values: Sequence[float]) -> list[float]:
    return [max(value, _RESOLUTION) for value in values]


def _tidy(axes: Axes) -> None:
    axes.grid(color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
