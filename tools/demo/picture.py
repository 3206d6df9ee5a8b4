"""The loss curves and their difference as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.backends.backend_agg import FigureCanvasAgg

from .tolerance import tolerance

#: What `save` can write, by the name's ending.
FORMATS = tuple(sorted(FigureCanvasAgg.filetypes))


def in_text(ours: Sequence[float], plain: Sequence[float], width: int = 64, height: int = 9) -> str:
    """The curves as lines of text: `o` where ours is, `.` where plain PyTorch's is and ours is not."""
    columns = min(width, len(ours))
    picked = [round(i * (len(ours) - 1) / max(1, columns - 1)) for i in range(columns)]
    shown = [loss for curve in (ours, plain) for loss in curve if math.isfinite(loss)]
    high, low = max(shown, default=1.0), min(shown, default=0.0)
    step = (high - low) / (height - 1) or 1.0
    rows = [[" "] * columns for _ in range(height)]
    for curve, mark in ((plain, "."), (ours, "o")):
        for column, place in enumerate(picked):
            if math.isfinite(curve[place]):
                rows[round((high - curve[place]) / step)][column] = mark
    lines = [f"{high - step * number:6.2f} |{''.join(row).rstrip()}" for number, row in enumerate(rows)]
    return "\n".join([*lines, f"       +{'-' * columns}", f"        step 1{len(ours):>{max(1, columns - 6)}}"])


def save(path: Path, ours: Sequence[float], plain: Sequence[float], title: str) -> None:
    """Write the picture: both curves above, their difference below with the tolerance."""
    steps = range(1, len(plain) + 1)
    figure, (top, bottom) = plt.subplots(
        2, sharex=True, figsize=(8, 6), height_ratios=(2, 1), layout="constrained", subplot_kw={"axisbelow": True}
    )
    top.plot(steps, plain, color="#b8c4d6", linewidth=5, label="plain PyTorch")
    top.plot(steps, ours, color="#c0392b", linewidth=1.2, label="our operators")
    top.set_ylabel("loss, nats per byte")
    top.set_title(title)
    top.legend(frameon=False)
    # A difference of zero has no place on a logarithmic axis: it is drawn just below the smallest that fp32 can show.
    resolution = 1e-7
    difference = [max(abs(a - b), resolution) for a, b in zip(ours, plain, strict=True)]
    bottom.semilogy(steps, difference, color="#c0392b", linewidth=1.2, label="|difference|")
    allowed = [tolerance(step) for step in range(len(plain))]
    bottom.semilogy(steps, allowed, color="#444444", linewidth=1, linestyle="--", label="tolerance")
    bottom.margins(y=0.3)
    bottom.set_ylim(bottom=resolution / 2)
    bottom.set_ylabel("difference, nats")
    bottom.set_xlabel("step")
    bottom.legend(frameon=False, loc="upper left", ncols=2)
    for axes in (top, bottom):
        axes.grid(color="#e6e6e6", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
