"""`npu-offline releases`: what changes with the defaults of another release of triton-ascend.

A release that is not installed here is represented by the defaults that it passes to the compilers, as far as these know
them. They were read from `third_party/ascend/backend/compiler.py` of the branch release/3.2.1, commit 8763c3161; the source
of 3.2.2 was not read.
"""

from __future__ import annotations

import argparse
import os
import re
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import check
from ..errors import CompilationError
from ..launches import LaunchRecord, describe_tile
from ..toolchain import compilation
from ..toolchain import compilers as toolchains
from .options import add_target, soc_name
from .output import new_console, progress

if TYPE_CHECKING:
    from . import Subparsers

SOCS = ("Ascend910B4", "Ascend950PR_957b")
"""Compiled for unless others are asked for: one chip of each architecture."""
_MIX_MODE = re.compile(r',\s+mix_mode\s*=\s*"[^"]*"|mix_mode\s*=\s*"[^"]*",\s*')


@dataclass(frozen=True)
class Release:
    """How a release of triton-ascend compiles, where it differs from 3.2.0.

    Attributes:
        options: defaults that are others, of options that 3.2.0 has too.
        a5_flags: what it gives bishengir-compile-a5 beside them.
        not_run: what its front end alone has.
    """

    options: Mapping[str, object]
    a5_flags: tuple[str, ...]
    not_run: tuple[str, ...]


RELEASES = {
    "3.2.1": Release(
        # auto_tile_and_bind_subblock, true unless a module says otherwise, reaches the compiler as this last option.
        {"num_warps": 32, "enable_select_analysis": True, "enable_auto_bind_sub_block": True},
        ("--enable-vf-merge-level=1",),
        (
            "auto_blockify_size and its pass",
            "enable_mask_fallback_conversion and the pass triton-to-structure",
            "enable_sync_block_lock of the pass for discrete masks",
        ),
    )
}


def changed(launch: LaunchRecord, release: Release, soc: str, toolchain: str) -> str:
    """What another release makes of a launch, in words; "" where it is the same final module.

    The attribute `mix_mode`, which 3.2.1 leaves in the module and 3.2.0 takes out, does not count.

    Raises:
        CompilationError: the compiler refused it.
    """
    other = compilation.as_record(launch, None, None, {**release.options, **launch.options})
    (name, _, linalg), (_, _, of_other) = compilation.front_end_of(launch), compilation.front_end_of(other)
    before = compilation.compile_linalg(name, "", linalg, dict(launch.options), soc, toolchain)
    program = toolchains.compiler(soc, toolchain)
    assert program is not None  # or the line before had failed
    flags = [*compilation._flags(other.options), *(release.a5_flags if toolchains.is_a5(soc) else ())]
    kept = of_other.replace(", mix_mode", ",  mix_mode")  # two spaces: what takes the attribute out does not find it
    after = compilation._run(program, name, {"linalg": kept}, flags, soc, toolchain)
    if before.fits != after.fits:
        return f"it fits with one release alone: {before.message or after.message}"
    if before.fits and _MIX_MODE.sub("", before.stages["final"]) != _MIX_MODE.sub("", after.stages["final"]):
        return "another final module"
    return "another Linalg IR, the same final module" if linalg != of_other else ""


def add_parser(commands: Subparsers) -> None:
    """Add `releases` to the command line."""
    parser = commands.add_parser(
        "releases", help="compile with the defaults of another triton-ascend, and list what changes"
    )
    add_target(parser)
    parser.add_argument("--release", default="3.2.1", choices=sorted(RELEASES), help="of triton-ascend (%(default)s)")
    socs = f"a chip ({', '.join(SOCS)})"
    parser.add_argument("--soc", action="append", type=soc_name, metavar="NAME", help=socs)
    parser.add_argument("--toolchain", default=toolchains.DEFAULT, choices=toolchains.VERSIONS, help="(%(default)s)")
    parser.add_argument("--sample", action="store_true", help="of a package, the calls that stand for all")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    console = new_console()
    calls = check.load_calls(options.target, given=options.given, grid=options.grid)
    if options.sample:
        labels = check.load_sample(options.target)
        calls = [call for call in calls if call[0] in labels]
    release = RELEASES[options.release]
    wanted: dict[str, tuple[str, LaunchRecord]] = {}
    for soc in options.soc or SOCS:
        for launch in check.launches_of(calls, soc):
            what = f"{launch.name} on {soc}: {describe_tile(launch)}"
            wanted.setdefault(f"{what} {sorted(launch.options.items())} {sorted(launch.divisible)}", (soc, launch))

    def examine(each: tuple[str, LaunchRecord]) -> tuple[str, LaunchRecord, str]:
        soc, launch = each
        try:
            return soc, launch, changed(launch, release, soc, options.toolchain)
        except CompilationError as error:
            return soc, launch, f"refused: {error}"

    found: dict[str, list[str]] = defaultdict(list)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for soc, launch, said in progress(pool.map(examine, wanted.values()), "compiling", len(wanted), console):
            if said:
                found[said].append(f"{launch.name} on {soc}: {describe_tile(launch)}")
    for said, lines in found.items():
        for line in lines:
            console.print(f"{line}: {said}", markup=False)
    console.print(f"{len(wanted)} tiles, {sum(map(len, found.values()))} changed by {options.release}", markup=False)
    for what in release.not_run:
        console.print(f"not run: {what}", markup=False)
    return 1 if found else 0
