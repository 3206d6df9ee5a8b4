"""`npu-offline doctor`: problems of the installation. `npu-offline cache`: the size of the cache, and emptying it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from npu_tiling import doctor
from npu_tiling.doctor import Problem

from ..execute.c_compiler import missing_c_compiler
from ..toolchain import cache
from ..toolchain import compilers as toolchains

if TYPE_CHECKING:
    from . import Subparsers


def add_parser(commands: Subparsers) -> None:
    """Add both commands to the command line."""
    doctor_parser = commands.add_parser("doctor", help="what is wrong with this installation, and the commands that mend it")
    doctor_parser.set_defaults(run=_doctor)
    parser = commands.add_parser("cache", help="what the cache folder holds; `clean` empties it")
    parser.add_argument("action", nargs="?", choices=("size", "clean"), default="size", help="(%(default)s)")
    parser.add_argument("--toolchains", action="store_true", help="clean: the compilers too, which are fetched again")
    parser.set_defaults(run=_cache)


def problems() -> list[Problem]:
    """Problems that keep kernels from being compiled or emulated, other than those of Triton."""
    found = []
    for version in toolchains.VERSIONS:
        reason = toolchains.damaged(version)
        if reason:
            found.append(Problem(f"Toolchain {version}: {reason}.", (f"npu-offline fetch {version}",)))
    reason = missing_c_compiler()
    return [*found, Problem(f"{reason}.")] if reason else found


def _doctor(_: argparse.Namespace) -> int:
    return doctor.main(ascend=True, more=problems)


def _cache(options: argparse.Namespace) -> int:
    if options.action == "clean":
        print(f"{_megabytes(cache.clean(toolchains=options.toolchains))} removed from {cache.cache_dir()}")
        return 0
    sizes = cache.sizes()
    for name, size in sizes.items():
        print(f"{_megabytes(size):>12}  {name}")
    print(f"{_megabytes(sum(sizes.values())):>12}  {cache.cache_dir()}")
    return 0


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
