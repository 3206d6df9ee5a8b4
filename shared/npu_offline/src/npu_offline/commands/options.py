"""Arguments that commands share."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..check.kernel_file import FORMS
from ..toolchain import compilers as toolchains


def add_target(parser: argparse.ArgumentParser) -> None:
    """What a command works on: one kernel with its arguments, a file of calls, or a package."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"{FORMS}\n\nexample: npu-offline {{}} softmax.py::softmax x=fp32:512x1000 n=1000 --grid 512"
    parser.epilog = parser.epilog.format(parser.prog.split()[-1])
    target = "FILE::KERNEL, a FILE with calls(), or a folder with tests/ascend_calls.py"
    parser.add_argument("target", type=Path, metavar="TARGET", help=target)
    parser.add_argument("given", nargs="*", metavar="NAME=VALUE", help="the kernel's arguments: see below")
    parser.add_argument(
        "--grid", metavar="X[,Y[,Z]]", help="the kernel's programs: numbers, arguments, cdiv(a, b), cores, cube_cores"
    )


def add_what_to_time(parser: argparse.ArgumentParser) -> None:
    """What to time, one chip and toolchain that its launches are predicted for, and which of its calls."""
    add_target(parser)
    parser.add_argument(
        "--soc",
        default="Ascend910B4",
        metavar="NAME",
        help="a chip whose costs are known; an Ascend950 for vector kernels (Ascend910B4)",
    )
    parser.add_argument(
        "--toolchain", default=toolchains.DEFAULT, choices=toolchains.VERSIONS, help="compiler version (%(default)s)"
    )
    parser.add_argument("--call", default="", metavar="TEXT", help="only calls whose label has this text")
