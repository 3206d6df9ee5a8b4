"""Convergence: `python -m tools.convergence`, or `hatch run convergence`.

Trains the demo's byte-level model (Block AttnRes and all four operators) on English text, in fp32, bf16 and under autocast,
eagerly and through torch.compile, beside the same model in plain PyTorch. Every run is measured on the same held-out text.
It may be no further from plain PyTorch than plain PyTorch is from itself with another order of the data.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..demo.blocks import OURS, PLAIN, Blocks
from ..demo.places import NAMES, Place, PlaceError, find_place
from ..demo.training import Setup
from . import picture
from .band import band, differences, leaves
from .runs import EVERY, PRECISIONS, Curve, train

Curves = dict[str, list[Curve]]


def main(argv: Sequence[str] | None = None, setup: Setup | None = None, ours: Blocks = OURS) -> int:
    """Run it.

    Args:
        argv: the command line without the program's name.
        setup: other sizes than the demo's; --steps and --seed come on top.
        ours: blocks to compare with plain PyTorch.

    Returns:
        The exit status: 0 if every run stays within its band, 1 if one does not, 2 if it cannot run here.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    options = _parser().parse_args(arguments)
    sizes = {name: getattr(options, name) for name in ("steps", "batch", "context", "seed")}
    sizes = {name: value for name, value in sizes.items() if value is not None}
    setup = dataclasses.replace(setup or Setup(), **{"steps": 300, **sizes})
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    try:
        place = find_place(options.device, options.soc)
    except PlaceError as error:
        print(error, file=sys.stderr)
        return 2
    compiled = options.compile if options.compile is not None else place.name in ("cpu", "cuda")
    curves = _curves(console, setup, place, ours, options.precision, compiled)
    about = {
        "command": " ".join(["python -m tools.convergence", *arguments]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": str(place),
        "torch": torch.__version__,
        "setup": dataclasses.asdict(setup),
        "measured_every": EVERY,
    }
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**about, "curves": _plain_data(curves)}, separators=(",", ":")) + "\n")
    if options.plot is not None:
        shape = setup.model
        model = f"{shape.layers} layers of {shape.hidden_size}, {setup.batch} x {setup.context} bytes a step"
        picture.save(options.plot, curves, f"Byte-level language model, {model}, on {place}, {about['date']}")
        console.print(f"Curves: {options.plot}")
    return _verdict(console, curves)


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="convergence", description=__doc__, formatter_class=raw)
    where = "where our operators run (the machine's accelerator; without one, emulated)"
    parser.add_argument("--device", choices=NAMES, help=where)
    parser.add_argument("--soc", help="the Ascend chip, for --device emulated and npu")
    parser.add_argument("--steps", type=_at_least(EVERY), help=f"of every run, at least {EVERY} (300)")
    parser.add_argument("--batch", type=_at_least(1), help="sequences of a step (the demo's)")
    parser.add_argument("--context", type=_at_least(1), help="bytes of a sequence (the demo's)")
    parser.add_argument("--seed", type=_at_least(0), help="of the initial parameters (0)")
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=PRECISIONS, help="(all)")
    compiled = "also train through torch.compile (on the CPU and CUDA)"
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help=compiled)
    parser.add_argument("--plot", type=Path, help="picture of the curves")
    parser.add_argument("--json", type=Path, help="every loss of every run")
    return parser


def _at_least(smallest: int) -> Callable[[str], int]:
    def number(argument: str) -> int:
        if not argument.isdecimal() or int(argument) < smallest:
            raise argparse.ArgumentTypeError(f"{argument!r} must be a whole number of at least {smallest}")
        return int(argument)

    return number


def _curves(console: Console, setup: Setup, place: Place, ours: Blocks, precisions: Sequence[str], compiled: bool) -> Curves:
    """Of each precision: plain PyTorch, the same with another order of the data, and ours."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    found: Curves = {}
    with Progress(*columns, console=console) as progress:
        for precision in precisions:
            jobs: list[tuple[str, Blocks, Any, dict[str, Any]]] = [
                (PLAIN.name, PLAIN, contextlib.nullcontext(), {}),
                (f"{PLAIN.name}, other order", PLAIN, contextlib.nullcontext(), {"order": 1}),
                (ours.name, ours, place.open(), {}),
            ]
            if compiled:
                jobs.append((f"{ours.name}, compiled", ours, place.open(), {"backend": "inductor"}))
            found[precision] = []
            for name, blocks, where, options in jobs:
                task = progress.add_task(f"{precision}, {name}", total=setup.steps)
                start = time.perf_counter()
                with where:
                    losses = train(
                        setup, blocks, place.device, precision, **options, on_step=lambda _, t=task: progress.advance(t)
                    )
                found[precision].append(Curve(name, *losses, seconds=time.perf_counter() - start))
                if not console.is_terminal:
                    console.print(f"{precision}, {name}: {found[precision][-1].seconds:.0f} s")
    return found


def _plain_data(curves: Curves) -> dict[str, list[dict[str, Any]]]:
    """The losses to the six digits that fp32 has; no times, which depend on what else the machine did."""
    rounded = lambda losses: [float(f"{loss:.6g}") for loss in losses]  # noqa: E731
    return {
        precision: [
            {"name": curve.name, "training": rounded(curve.training), "held_out": rounded(curve.held_out)} for curve in each
        ]
        for precision, each in curves.items()
    }


def _verdict(console: Console, curves: Curves) -> int:
    table = Table(title="Loss on held-out text, nats per byte")
    for title in ("precision", "run"):
        table.add_column(title)
    for title in ("last", "largest difference", "of the band", "seconds"):
        table.add_column(title, justify="right")
    wrong = []
    for precision, (plain, other, *ours) in curves.items():
        allowed = band(plain, other)
        for curve in (plain, other, *ours):
            off = differences(curve, plain)
            share = max(difference / most if most else 0.0 for difference, most in zip(off, allowed, strict=True))
            shown = ("", "") if curve is plain else (f"{max(off):.1e}", f"{share:.1%}")
            table.add_row(precision, curve.name, f"{curve.held_out[-1]:.4f}", *shown, f"{curve.seconds:.0f}")
        left = [(curve.name, leaves(curve, plain, allowed)) for curve in ours]
        wrong += [f"{precision}: {name} from step {step}" for name, step in left if step is not None]
    console.print(table)
    if wrong:
        console.print(f"[bold red]Outside the band[/]: {'; '.join(wrong)}.")
        return 1
    console.print("[bold green]Every run of ours is within the band[/] of two orders of the data.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
