"""The demo: `python -m tools.demo`, or `hatch run demo:run`.

Trains a small byte-level language model on English text, once in plain PyTorch and once with our operators, from the
same parameters and on the same batches, and compares the loss of every step.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from . import picture
from .blocks import OURS, PLAIN, Blocks
from .places import DEFAULT_SOC, NAMES, Place, PlaceError, find_place, has_offline_compiler
from .tolerance import tolerance
from .training import Setup, text, train

if TYPE_CHECKING:
    from .kernels import Kernels


def main(argv: Sequence[str] | None = None, setup: Setup | None = None, ours: Blocks = OURS) -> int:
    """Run the demo.

    Args:
        argv: the command line without the program's name.
        setup: other sizes than the usual ones; --steps and --seed come on top.
        ours: blocks to compare with plain PyTorch.

    Returns:
        The exit status: 0 if the curves agree, 1 if they do not or a kernel does not fit its chip, 2 if the demo cannot
        run here.
    """
    setup = setup or Setup()
    options = _parser(setup).parse_args(argv)
    setup = dataclasses.replace(setup, steps=options.steps, seed=options.seed)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 130)
    try:
        return _demo(console, setup, find_place(options.device, options.soc), options.output, ours)
    except PlaceError as error:
        print(error, file=sys.stderr)
        return 2


def _parser(setup: Setup) -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="demo", description=__doc__, formatter_class=raw)
    parser.add_argument(
        "--device", choices=NAMES, help="where our operators run (the machine's accelerator; without one, emulated)"
    )
    parser.add_argument("--soc", help=f"the Ascend chip, for --device emulated ({DEFAULT_SOC}) and npu (as found)")
    parser.add_argument("--steps", type=_at_least(1), default=setup.steps, help="training steps (%(default)s)")
    parser.add_argument("--seed", type=_at_least(0), default=setup.seed, help="of parameters and batches (%(default)s)")
    parser.add_argument("--output", type=_picture, default="build/demo.png", help="picture of the curves (%(default)s)")
    return parser


def _at_least(smallest: int) -> Callable[[str], int]:
    def number(argument: str) -> int:
        if not argument.isdecimal() or int(argument) < smallest:
            raise argparse.ArgumentTypeError(f"{argument!r} must be a whole number of at least {smallest}")
        return int(argument)

    return number


def _picture(argument: str) -> Path:
    path = Path(argument)
    if path.suffix.removeprefix(".").lower() not in picture.FORMATS:
        raise argparse.ArgumentTypeError(f"{argument!r} must end in one of {', '.join(picture.FORMATS)}")
    return path


def _demo(console: Console, setup: Setup, place: Place, output: Path, ours: Blocks) -> int:
    sizes = setup.model
    console.print(
        f"A transformer of {sizes.layers} layers, hidden size {sizes.hidden_size}, {sizes.heads} heads, in fp32. "
        f"{setup.steps} steps of {setup.batch} x {setup.context} bytes out of {len(text()) // 1000} kB of English (the "
        f"language reference that comes with Python), seed {setup.seed}."
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    kernels = None
    if place.soc is not None and has_offline_compiler():
        from .kernels import Kernels

        with console.status(f"compiling the kernels of one step for {place.soc}"):
            kernels = Kernels(setup, place.soc)
    host = "CPU" if place.name == "emulated" else str(place)
    plain_losses, plain_time = _run(console, setup, PLAIN, place, host)
    our_losses, our_time = _run(console, setup, ours, place, str(place), kernels, plain_losses)
    console.print(
        _losses_table([(PLAIN.name, host, plain_losses, plain_time), (ours.name, str(place), our_losses, our_time)])
    )
    if kernels is not None:
        console.print(kernels.table())
        console.print(kernels.summary() or "Traffic is not counted on a real chip: --device emulated counts it.")
    elif place.name == "cpu":
        console.print("No kernel ran: on a CPU our operators are plain PyTorch. --device emulated runs their kernels.")
    else:
        console.print("What kernels use of an Ascend chip takes npu-offline: --device emulated shows it.")
    picture.save(output, our_losses, plain_losses, f"Byte-level language model, {ours.name} on {place}")
    console.print("Loss, nats per byte: o our operators, . plain PyTorch where it is elsewhere", markup=False)
    console.print(picture.in_text(our_losses, plain_losses), markup=False)
    console.print(f"Loss curves and their difference: {output}")
    overflowing = kernels.overflowing() if kernels is not None else []
    if overflowing:
        console.print(f"[bold red]The tile does not fit[/] {place.soc}: {', '.join(overflowing)}.")
    return max(_verdict(console, our_losses, plain_losses), int(bool(overflowing)))


def _run(
    console: Console,
    setup: Setup,
    blocks: Blocks,
    place: Place,
    where: str,
    kernels: Kernels | None = None,
    reference: Sequence[float] | None = None,
) -> tuple[list[float], float]:
    """Train with a progress bar: the losses, which are shown against `reference`, and the seconds taken."""
    columns = (
        "{task.description}",
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    tenth = -(-setup.steps // 10)
    name = f"{blocks.name}, {where}"
    with Progress(*columns, console=console) as progress, place.open() as emulation:
        task = progress.add_task(name, total=setup.steps, loss="")

        def on_step(step: int, loss: float) -> None:
            if emulation is not None and kernels is not None:
                kernels.count(emulation.launches)
            said = f"loss {loss:.4f}"
            if reference is not None:
                said += f", {abs(loss - reference[step]):.0e} off"
            progress.update(task, advance=1, loss=said)
            if not console.is_terminal and ((step + 1) % tenth == 0 or step == 0):
                console.print(f"{name}: step {step + 1}, {said}")

        start = time.perf_counter()
        losses = train(setup, blocks, place.device, on_step)
    return losses, time.perf_counter() - start


def _losses_table(runs: Sequence[tuple[str, str, Sequence[float], float]]) -> Table:
    tail = max(1, min(20, len(runs[0][2]) // 2))
    table = Table(title="Loss, nats per byte")
    table.add_column("model of")
    table.add_column("on")
    for title in ("first step", f"mean of last {tail}", "seconds a step"):
        table.add_column(title, justify="right")
    for name, where, losses, seconds in runs:
        last = sum(losses[-tail:]) / tail
        table.add_row(name, where, f"{losses[0]:.4f}", f"{last:.4f}", f"{seconds / len(losses):.3f}")
    return table


def _verdict(console: Console, ours: Sequence[float], plain: Sequence[float]) -> int:
    differences = [abs(a - b) for a, b in zip(ours, plain, strict=True)]
    # A loss that is not a number is as wrong as can be, and compares with nothing: hence no `>`.
    wrong = [step for step, difference in enumerate(differences) if not difference <= tolerance(step)]
    worst = wrong[0] if wrong else max(range(len(differences)), key=differences.__getitem__)
    said = f"at step {worst + 1} of {len(differences)}, where the tolerance is {tolerance(worst):.1e}"
    if wrong:
        console.print(f"[bold red]The curves do not agree[/]: first a difference of {differences[worst]:.1e} {said}.")
        return 1
    console.print(f"[bold green]The curves agree[/]: largest difference {differences[worst]:.1e}, {said}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
