"""Arguments that commands share."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..toolchain import compilers as toolchains


def add_what_to_time(parser: argparse.ArgumentParser) -> None:
    """A package, one chip and toolchain that its launches are predicted for, and which of its calls."""
    parser.add_argument("package", type=Path, help="a folder with tests/ascend_calls.py")
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
