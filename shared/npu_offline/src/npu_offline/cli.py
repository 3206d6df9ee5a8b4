"""The command line. Each command is a module of the folder `commands`."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import sys
from collections.abc import Sequence

from .errors import OfflineError
from .execute.settings import timed
from .toolchain import compilers

_COMMANDS = ("all", "check", "bounds", "run", "lint", "conformance", "releases", "time", "tune", "model", "report")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser(words)
    if not words:
        parser.print_help()
        return 0
    words, script = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    options, rest = parser.parse_known_args(words)
    if script and not hasattr(options, "script"):
        parser.error(f"unrecognized arguments: -- {' '.join(script)}")
    options.script, options.parse = script, lambda words: _parser(words).parse_args(words)
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


def _parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser of a command line, with the command that it names alone: the modules of others are not imported."""
    parser = argparse.ArgumentParser(
        prog="npu-offline",
        description="Triton kernels for Ascend without an NPU: compile, run, check, prove, lint, time, tune",
    )
    parser.add_argument("--version", action="version", version=f"npu-offline {importlib.metadata.version('npu-offline')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    fetch = commands.add_parser("fetch", help="install compiler versions into the cache folder")
    fetch.add_argument("versions", nargs="*", metavar="VERSION", help=f"of {', '.join(compilers.VERSIONS)} (all)")
    fetch.set_defaults(run=_fetch)
    modules = {**{name: name for name in _COMMANDS}, "doctor": "maintenance", "cache": "maintenance"}
    named = modules.get(words[0]) if words else None
    for name in [named] if named else dict.fromkeys(modules.values()):
        importlib.import_module(f".commands.{name}", __package__).add_parser(commands)
    return parser


def _fetch(options: argparse.Namespace) -> int:
    for folder in compilers.fetch(options.versions or compilers.VERSIONS):
        print(folder)
    return 0
