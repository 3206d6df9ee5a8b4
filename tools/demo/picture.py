"""The loss curves and their difference as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.backends.backend_agg import FigureCanvasAgg

from .tolerance import tolerance

#: What `save` can write, by the name's ending.
FORMATS = tuple(sorted(FigureCanvasAgg.filetypes))


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
