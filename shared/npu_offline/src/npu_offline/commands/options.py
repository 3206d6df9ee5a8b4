"""Arguments that commands share."""

from __future__ import annotations

import argparse
import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, get_args

import npu_tiling

from .. import check
from ..check.values import FORMS
from ..errors import OfflineError
from ..toolchain import compilers as toolchains

if TYPE_CHECKING:
    from ..timing.traffic import L2State

_GIGA = 1e9


def soc_name(text: str) -> str:
    """A chip's name, for options."""
    if text in npu_tiling.SOCS:
        return text
    close = [name for name in npu_tiling.SOCS if text and text.lower() in name.lower()]
    close = close or difflib.get_close_matches(text, npu_tiling.SOCS, n=4, cutoff=0.5) or list(npu_tiling.SOCS)
    raise argparse.ArgumentTypeError(f"{text!r} is no chip; did you mean {', '.join(close[:8])}?")


def add_target(parser: argparse.ArgumentParser, *, or_script: bool = False) -> None:
    """What a command works on: one kernel with its arguments, a file of calls, or a package; also a program after `--`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"{FORMS}\n\nexample: npu-offline {{}} softmax.py::softmax x=fp32:512x1000 n=1000 --grid 512"
    parser.epilog = parser.epilog.format(parser.prog.split()[-1])
    target = "FILE::KERNEL, a FILE with calls(), a folder with tests/ascend_calls.py, or RECORD::KERNEL of `run --record`"
    if or_script:
        target += "; or none, and a program: -- python FILE ..."
    parser.add_argument("target", type=Path, nargs="?" if or_script else None, metavar="TARGET", help=target)
    parser.add_argument("given", nargs="*", metavar="NAME=VALUE", help="the kernel's arguments: see below")
    programs = "the kernel's programs: numbers, arguments, cdiv(a, b), cores, cube_cores; 1 if it asks for none"
    parser.add_argument("--grid", metavar="X[,Y[,Z]]", help=programs)


def add_call(parser: argparse.ArgumentParser) -> None:
    """Which of a target's calls."""
    parser.add_argument("--call", default="", metavar="TEXT", help="only calls whose label has this text")


def calls_of(options: argparse.Namespace, function: str = "calls") -> list[tuple[Any, ...]]:
    """The calls that `add_target` and `add_call` name; `function`: of a file of calls."""
    loaded = check.load_calls(options.target, function, options.given, options.grid)
    calls = [call for call in loaded if options.call in call[0]]
    if options.call and not calls:
        raise OfflineError(f"--call is {options.call!r}, must be part of a label that {function}() yields")
    return calls


def add_limit(parser: argparse.ArgumentParser) -> None:
    """How long launches may take."""
    parser.add_argument("--limit", type=seconds, metavar="SECONDS", help="stop a launch that takes longer (no limit)")


def seconds(text: str) -> float:
    """A time above 0, for options."""
    try:
        if float(text) > 0:
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds above 0")


def add_what_to_time(parser: argparse.ArgumentParser) -> None:
    """What to time, one chip and toolchain that its launches are predicted for, and which of its calls."""
    from ..timing.traffic import L2State

    add_target(parser)
    parser.add_argument(
        "--soc",
        type=soc_name,
        default="Ascend910B4",
        metavar="NAME",
        help="a chip whose costs are known; an Ascend950 for vector kernels (Ascend910B4)",
    )
    parser.add_argument(
        "--toolchain", default=toolchains.DEFAULT, choices=toolchains.VERSIONS, help="compiler version (%(default)s)"
    )
    parser.add_argument(
        "--l2",
        default="cold",
        choices=get_args(L2State),
        help="what the L2 cache has before a launch: nothing, all it can hold, or others' written memory (%(default)s)",
    )
    parser.add_argument(
        "--clock", type=float, metavar="GHZ", help="of the cores, for a chip of which none is published: an assumption"
    )
    add_call(parser)


class Where(TypedDict):
    """What launches are predicted for, as `time_launch` takes it."""

    soc: str
    toolchain: str
    l2: L2State
    clock: float | None


def where_of(options: argparse.Namespace) -> Where:
    """What the arguments of `add_what_to_time` say launches are predicted for."""
    clock = None if options.clock is None else options.clock * _GIGA
    return {"soc": options.soc, "toolchain": options.toolchain, "l2": options.l2, "clock": clock}


def assumptions(options: argparse.Namespace) -> str:
    """What a table of predicted times says of them."""
    clock = "" if options.clock is None else f", clock assumed to be {options.clock:g} GHz"
    return f"predicted, not measured; L2 cache {options.l2}{clock}"
