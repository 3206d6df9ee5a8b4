"""The command line. Each command is a module of the folder `commands`."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence

from .commands import all as all_commands
from .commands import bounds, check, conformance, lint, maintenance, releases, report, run, time, tune
from .errors import OfflineError
from .execute.settings import timed
from .toolchain import compilers


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = _parser()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words:
        parser.print_help()
        return 0
    words, script = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    options, rest = parser.parse_known_args(words)
    if script and not hasattr(options, "script"):
        parser.error(f"unrecognized arguments: -- {' '.join(script)}")
    options.script = script
    given = [text for text in rest if "=" in text and not text.startswith("-")]  # NAME=VALUE after an option
    if given != rest or (given and "given" not in options):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if given:
        options.given = [*options.given, *given]
    try:
        with timed(getattr(options, "limit", None)):
            return int(options.run(options))
    except KeyboardInterrupt:
        print("npu-offline: stopped", file=sys.stderr)
        return 130
    except Exception as error:
        from_triton = type(error).__module__.startswith("triton.")
        if not isinstance(error, OfflineError) and not from_triton:
            raise
        print(f"npu-offline: {'Triton refuses the kernel: ' if from_triton else ''}{error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="npu-offline",
        description="Triton kernels for Ascend without an NPU: compile, run, check, prove, lint, time, tune",
    )
    parser.add_argument("--version", action="version", version=f"npu-offline {importlib.metadata.version('npu-offline')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    fetch = commands.add_parser("fetch", help="install compiler versions into the cache folder")
    fetch.add_argument("versions", nargs="*", metavar="VERSION", help=f"of {', '.join(compilers.VERSIONS)} (all)")
    fetch.set_defaults(run=_fetch)
    all_commands.add_parser(commands, parser.parse_args)
    check.add_parser(commands)
    bounds.add_parser(commands)
    run.add_parser(commands)
    lint.add_parser(commands)
    conformance.add_parser(commands)
    releases.add_parser(commands)
    time.add_parser(commands)
    tune.add_parser(commands)
    report.add_parser(commands)
    maintenance.add_parsers(commands)
    return parser


def _fetch(options: argparse.Namespace) -> int:
    for folder in compilers.fetch(options.versions or compilers.VERSIONS):
        print(folder)
    return 0
