"""`npu-offline all`: run, check, lint and time of one kernel, with one start and one line at the end."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import OfflineError
from .options import add_limit, add_target, soc_name
from .output import new_console, print_line, write_json

if TYPE_CHECKING:
    from . import Subparsers

_SAID = {0: "nothing wrong", 1: "findings", 2: "not run"}  # by exit status
_MOST = 2  # of the statuses that are said
_EXECUTES = ("check", "time")
_ENDLESS = "a loop does not end"


def add_parser(commands: Subparsers) -> None:
    """Add `all` to the command line."""
    parser = commands.add_parser("all", help="run, check, lint and time of one kernel, with one start")
    add_target(parser)
    parser.add_argument("--soc", default="Ascend910B4", type=soc_name, metavar="NAME", help="a chip (%(default)s)")
    parser.add_argument("--expect", action="append", default=[], metavar="NAME=EXPRESSION", help="as `run` takes it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what each command writes there, by its name")
    add_limit(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    console = new_console()
    about = [str(options.target), *options.given, "--soc", options.soc]
    about += ["--grid", options.grid] if options.grid is not None else []
    expected = [word for text in options.expect for word in ("--expect", text)]
    statuses: dict[str, int] = {}
    said: dict[str, str] = {}
    written: dict[str, object] = {}
    endless = False
    for command, more in (("run", expected), ("check", []), ("lint", []), ("time", [])):
        if endless and command in _EXECUTES:
            statuses[command], said[command], written[command] = _MOST, f"not run: {_ENDLESS}", {"problem": _ENDLESS}
            continue
        console.rule(command)
        chosen = options.parse([command, *about, *more])
        with tempfile.TemporaryDirectory() as folder:
            chosen.json = Path(folder, "written.json")
            try:
                statuses[command] = int(chosen.run(chosen))
                said[command] = getattr(chosen, "verdict", "")
                written[command] = json.loads(chosen.json.read_text())
                endless |= getattr(chosen, "endless", False)
            except OfflineError as error:
                console.print(str(error), markup=False)
                statuses[command], written[command] = _MOST, {"problem": str(error)}
    if options.json:
        write_json("--json", options.json, written)
    console.rule()
    line = "; ".join(f"{command}: {said.get(command) or _SAID[status]}" for command, status in statuses.items())
    print_line(console, line)
    found = set(statuses.values())
    return 1 if 1 in found else max(found)
