"""Runs launches of final modules with one defect each, and says what became of every defect.

A module is compiled once, with a switch for every defect.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import npu_offline.execute.emulation
import npu_offline.execute.launcher
import npu_tiling
import torch
from mutants import Mutant, mutants
from npu_offline import Finding, FindingsError, OfflineError, emulate
from npu_offline.execute.final.compare import differences
from npu_offline.execute.final.findings import raise_findings, read_findings
from npu_offline.execute.launcher import Launcher
from npu_offline.execute.linalg.lowering import ENTRY
from npu_offline.execute.loading import Binary, Loaded, load
from npu_offline.execute.native import shared_object_of_c
from npu_offline.execute.settings import RunningEmulation, running
from npu_offline.execute.storage import bounds_of
from orders import Program, ordered, reordered, trace_of
from switches import switched
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
    trace: bytes = b""
    programs: list[Program] = field(default_factory=list)
    notes: int = 0

    @functools.cached_property
    def library(self) -> Loaded:
        """The module with its switches, loaded."""
        source = switched(self.module)
        assert _ENTRY in source
        source = source.replace(_ENTRY, "{ note_event(T_PROGRAM, 0, 0, 0); execute(&M_, slots, x, y, z); }")
        source = source.replace(_NOTED, f"{_NOTED}\n{_TRACE}")
        return load(Binary(shared_object_of_c(source)), ENTRY)

    @functools.cached_property
    def planted(self) -> ctypes.Array[ctypes.c_int64]:
        """The switches of the library."""
        return (ctypes.c_int64 * sum(1 for _ in self.module.walk())).in_dll(self.library.libraries[0], "planted")


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
        error, site.notes = run(site)
        if error:
            raise error
        site.trace = trace_of(site.library.libraries[0])
        site.programs = ordered(site.trace)
        site.after = _copy(site.ranges)
    return list(found.values())


def fate(site: Site, mutant: Mutant) -> str:
    """What becomes of a defect.

    Returns:
        "found: KIND" as the checks say it, "found: results" where the comparison of results does; "unreached" where the
        launch issues exactly what it does without it; "redundant" where every pair of accesses to the same bytes is in the
        same order as without it, every read sees bytes of the same instructions and all results are equal; "noted" where
        hazards inside one pipe are noted that were not before, and nothing else has changed; "missed" otherwise.
    """
    error, notes = run(site, mutant.switches)
    if error:
        return f"found: {'+'.join(sorted(_kinds(error)))}"
    if _copy(site.ranges) != site.after:
        return "found: results" if _differ(site) else "missed: other results"
    if trace_of(site.library.libraries[0]) == site.trace:
        return "unreached"
    verdicts = changes(site)
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


def changes(site: Site) -> set[str]:
    """What differs between a site's own order of accesses and that of its last run; empty if nothing."""
    programs = zip(site.programs, ordered(trace_of(site.library.libraries[0])), strict=True)
    return {_changed(one, other) for one, other in programs} - {""}


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
    if one.operands != other.operands and one.sources != other.sources:
        return "bytes of other instructions"
    pairs = reordered(one, other)
    if not pairs:
        return ""
    return "one pipe" if all(other.places[a][:2] == other.places[b][:2] for a, b in pairs) else "no order"


def run(site: Site, switches: Iterable[tuple[int, int]] = ()) -> tuple[OfflineError | None, int]:
    """Run a site's launch with some switches on, with all checks but that against Linalg IR, until one finds something.

    Returns:
        What they find, and how many notes there are.
    """
    library = site.library.libraries[0]
    ctypes.memset(site.planted, 0, ctypes.sizeof(site.planted))
    for position, setting in switches:
        site.planted[position] = setting
    ctypes.c_int64.in_dll(library, "npu_trace_length").value = 0
    for (low, high), data in zip(site.ranges, site.before, strict=True):
        ctypes.memmove(low, data, high - low)
    emulation = RunningEmulation(SOC, site.toolchain, 1, None, checks=True)

    def found(noted: bytes, named: Callable[[str], str]) -> list[Finding]:
        raise_findings(site.kernel, noted, named)  # the runs that follow are for launches without findings
        return read_findings(noted, named)

    running.append(emulation)
    try:
        with mock.patch.object(npu_offline.execute.launcher, "read_findings", found):
            site.launch(site.library.address)
    except OfflineError as error:
        return error, 0
    finally:
        running.remove(emulation)
    (launch,) = emulation.launches
    site.written = site.written or {name: traffic.written for name, traffic in launch.arguments.items()}
    return None, len(launch.notes)


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
