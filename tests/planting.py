"""Runs launches of final modules with one defect each, and says what became of every defect."""

from __future__ import annotations

import ctypes
import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import npu_offline.execute.emulation
import npu_tiling
import torch
from mutants import Mutant, mutants
from npu_offline import FindingsError, OfflineError, UnsupportedError, emulate
from npu_offline.execute.final.compare import differences
from npu_offline.execute.final.translate import translate
from npu_offline.execute.launcher import Launcher, RunningEmulation, running
from npu_offline.execute.linalg.lowering import ENTRY
from npu_offline.execute.native import Binary, load, shared_object_of_c
from npu_offline.execute.storage import bounds_of
from orders import Program, conflicts, sources, traced
from xdsl.dialects.builtin import ModuleOp

SOC = "Ascend910B4"
_TRACE = Path(__file__).with_name("trace.c").read_text()
_NOTED = '#include "generated.h"'
_ENTRY = "{ execute(&M_, slots, x, y, z); }"


@dataclass
class Site:
    """A launch to plant defects in: its final module, its arguments, their bytes before it, and what it does as it is."""

    kernel: str
    toolchain: str
    module: ModuleOp
    launch: Callable[[int], None]
    pointers: list[tuple[str, str, Any]]  # name, Triton type and value
    ranges: list[tuple[int, int]]
    before: list[bytes]
    written: dict[str, int] = field(default_factory=dict)  # bytes through each pointer
    after: list[bytes] = field(default_factory=list)
    programs: list[Program] = field(default_factory=list)
    notes: int = 0


def sites(call: Callable[[], object], toolchain: str) -> list[Site]:
    """The first launch of each kernel of a call, on a chip with so few cores that each takes several tiles."""
    found: dict[str, Site] = {}
    modules: list[ModuleOp] = []

    class Keeping(Launcher):
        def __init__(self, source: Any, metadata: Any) -> None:
            super().__init__(source, metadata)
            self._module = modules[-1]

        def __call__(self, *given: Any) -> None:
            kernel = self._arguments.name
            if kernel not in found:
                kept = [value for value, keep in zip(given[9:], self._arguments.kept, strict=True) if keep]
                given_as = zip(self._arguments.types.items(), kept, strict=True)
                pointers = [(name, kind, value) for (name, kind), value in given_as if kind.startswith("*")]
                ranges = sorted({pair for _, _, value in pointers for pair in _ranges(value)})

                def launch(function: int) -> None:
                    Launcher.__call__(self, *given[:4], function, *given[5:])

                found[kernel] = Site(kernel, toolchain, self._module, launch, pointers, ranges, _copy(ranges))
            super().__call__(*given)

    real = npu_tiling.soc

    def small(name: str) -> npu_tiling.Device:
        return dataclasses.replace(real(name), vector_cores=2, cube_cores=1)

    with (
        mock.patch.object(npu_offline.execute.emulation, "Launcher", Keeping),
        mock.patch.object(npu_tiling, "soc", small),
        # What differs from Linalg IR is no matter here: CANN 8.5 drops roundings.
        emulate(SOC, toolchain=toolchain, threads=1, checks=True, keep_going=True, mutate=modules.append),
    ):
        call()
    for site in found.values():
        error, library, site.notes = run(site, site.module)
        if error or library is None:
            raise error or AssertionError
        site.programs = traced(library)
        site.after = _copy(site.ranges)
    return list(found.values())


def fate(site: Site, mutant: Mutant) -> str:
    """What becomes of a defect.

    Returns:
        "found: KIND" as the checks say it, "found: results" where the comparison of results does; "redundant" where every
        pair of accesses to the same bytes is in the same order as without it, every read sees bytes of the same
        instructions and all results are equal; "noted" where hazards inside one pipe are noted that were not before, and
        nothing else has changed; "missed" otherwise.
    """
    module = site.module.clone()
    mutant.plant(module)
    error, library, notes = run(site, module)
    if error or library is None:
        return f"found: {'+'.join(sorted(_kinds(error)))}"
    if _copy(site.ranges) != site.after:
        return "found: results" if _differ(site) else "missed: other results"
    verdicts = changes(site, library)
    if not verdicts:
        return "redundant"
    if verdicts == {"one pipe"} and notes > site.notes:
        return "noted"
    return f"missed: {', '.join(sorted(verdicts))}"


def _differ(site: Site) -> bool:
    """Whether the comparison with Linalg IR finds the results in memory: the module as it is computes what that does."""
    before, after = (
        {
            bounds: torch.frombuffer(bytearray(data), dtype=torch.uint8)
            for bounds, data in zip(site.ranges, copies, strict=True)
        }
        for copies in (site.before, site.after)
    )
    return any(True for _ in differences(site.pointers, before, after, site.written))


def changes(site: Site, library: ctypes.CDLL) -> set[str]:
    """What differs between a site's own order of accesses and that of a module that ran in its place; empty if nothing."""
    return {_changed(one, other) for one, other in zip(site.programs, traced(library), strict=True)} - {""}


def _kinds(error: OfflineError | None) -> set[str]:
    if not isinstance(error, FindingsError):
        return {type(error).__name__}
    return {
        f.text.partition(":")[0] if f.kind == "stop" and f.text.startswith("deadlock") else f.kind for f in error.findings
    }


def _changed(one: Program, other: Program) -> str:
    """What differs between the orders of two runs of one program."""
    if one.places != other.places:
        return "other instructions"
    if sources(one) != sources(other):
        return "bytes of other instructions"
    before, after = conflicts(one), conflicts(other)
    lost = {pair for pair in before.keys() | after.keys() if before.get(pair, "before") != after.get(pair, "before")}
    if not lost:
        return ""
    return "one pipe" if all(other.places[a][:2] == other.places[b][:2] for a, b in lost) else "no order"


def run(site: Site, module: ModuleOp) -> tuple[OfflineError | None, ctypes.CDLL | None, int]:
    """Run a module in a site's launch, with all checks but that against Linalg IR.

    Returns:
        What they find, the library that ran, and how many notes there are.
    """
    try:
        source = translate(module)
    except UnsupportedError as error:
        return error, None, 0
    assert _ENTRY in source
    source = source.replace(_ENTRY, "{ note_event(T_PROGRAM, 0, 0, 0); execute(&M_, slots, x, y, z); }")
    source = source.replace(_NOTED, f"{_NOTED}\n{_TRACE}")
    loaded = load(Binary(shared_object_of_c(source)), ENTRY)
    for (low, high), data in zip(site.ranges, site.before, strict=True):
        ctypes.memmove(low, data, high - low)
    emulation = RunningEmulation(SOC, site.toolchain, 1, None, checks=True)
    running.append(emulation)
    error = None
    try:
        site.launch(loaded.address)
    except OfflineError as found:
        error = found
    finally:
        running.remove(emulation)
    for launch in emulation.launches if not site.written else ():
        site.written = {name: traffic.written for name, traffic in launch.arguments.items()}
    return error, loaded.libraries[0], sum(len(launch.notes) for launch in emulation.launches)


def _ranges(value: Any) -> Iterator[tuple[int, int]]:
    bounds = bounds_of(value)
    return ((low, high) for low, high in zip(bounds[::2], bounds[1::2], strict=True) if high > low)


def _copy(ranges: list[tuple[int, int]]) -> list[bytes]:
    return [ctypes.string_at(low, high - low) for low, high in ranges]


def planted(site: Site, most: int | None, seed: int) -> Iterator[tuple[Mutant, str]]:
    """Defects with what becomes of them: all, or at most so many of them, of every kind alike."""
    chosen = list(mutants(site.module))
    if most is not None:
        random.Random(f"{seed} {site.kernel} {site.toolchain}").shuffle(chosen)
        seen: Counter[str] = Counter()
        rank = {}
        for mutant in chosen:
            rank[mutant] = seen[mutant.kind]
            seen[mutant.kind] += 1
        chosen = sorted(chosen, key=rank.__getitem__)[:most]
    for mutant in chosen:
        yield mutant, fate(site, mutant)
