"""`npu-offline report`: one page, and a JSON file, with the results of all analyses of packages' kernels."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import npu_tiling

from .. import check
from ..errors import OfflineError
from ..toolchain import compilers as toolchains
from .options import soc_name
from .output import new_folder, writing_to

if TYPE_CHECKING:
    from . import Subparsers


def add_parser(commands: Subparsers) -> None:
    """Add `report` to the command line."""
    parser = commands.add_parser("report", help="write a page and a JSON file on everything that packages launch")
    parser.add_argument("packages", nargs="*", type=Path, help="folders with tests/ascend_calls.py (packages/*)")
    parser.add_argument("--soc", action="append", type=soc_name, metavar="NAME", help="a chip (all)")
    parser.add_argument("--toolchain", action="append", choices=toolchains.VERSIONS, help="a version (all)")
    parser.add_argument("--sample", action="store_true", help="only the calls that tests/ascend_calls.py names in SAMPLE")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes (all cores)")
    parser.add_argument("--output", type=Path, default=Path("ascend-report"), metavar="FOLDER", help="(%(default)s)")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from ..reporting.collect import Scope, collect
    from ..reporting.page import render

    packages = options.packages or sorted(path.parents[1] for path in Path("packages").glob("*/tests/ascend_calls.py"))
    if not packages:
        raise OfflineError("packages is empty, must be folders with tests/ascend_calls.py: there are none in packages/")
    labels: dict[str, Sequence[str]] = {}
    if options.sample:
        labels = {folder.resolve().name: check.load_sample(folder) for folder in packages}
    new_folder("--output", options.output)
    scope = Scope(options.soc or list(npu_tiling.SOCS), options.toolchain or toolchains.VERSIONS, labels, options.jobs)
    folders = [folder.resolve() for folder in packages]
    report = collect(folders, scope, lambda line: print(line, file=sys.stderr))
    for name, text in (("report.json", json.dumps(report, indent=1)), ("index.html", render(report))):
        with writing_to("--output", options.output):
            (options.output / name).write_text(text)
        print(options.output / name)
    return 0
