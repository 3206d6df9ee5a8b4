"""What a call launches on a chip, and why: for people (`text`), and for tests and records (`launches`)."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..chips.devices import Device
from ..launching.recording import RecordedLaunch, dry_run

_PARTIALS = "partials"  # in the name of a kernel that adds partial sums
_BLOCK = re.compile(r"BLOCK|CHUNK|ROWS|STAGES|SHARE")  # in the name of a size that the tiling chooses


@dataclass(frozen=True, kw_only=True)
class ExplainedLaunch:
    """One launch and the reasons for it.

    Attributes:
        direction: "forward" or "backward".
        kernel: its name.
        module: full name of the module that it is in.
        defined_at: file and line of the kernel.
        called_from: file and line of the code that launches it.
        grid: number of programs.
        blocks: sizes that the tiling chose, by the name of the kernel's parameter.
        flags: the other `tl.constexpr` parameters.
        options: compiler options.
        memory: declared bytes of Unified Buffer of one program (on CUDA of shared memory); None: not declared.
        way: which of several ways; empty where there is one.
        why: the reason for it; empty where none is stated.
        decided_at: file and line of the rule or table's row; empty where it is not known.
        falls_back_to: what differs in the launch that follows where this one overflows; empty where none follows.
        partials_added_by: the kernel of a later launch that adds this one's partial sums; empty where there are none.
    """

    direction: str
    kernel: str
    module: str
    defined_at: str
    called_from: str
    grid: int
    blocks: Mapping[str, Any]
    flags: Mapping[str, Any]
    options: Mapping[str, Any]
    memory: int | None
    way: str
    why: str
    decided_at: str
    falls_back_to: str
    partials_added_by: str

    def lines(self, chip: Device) -> list[str]:
        """For people, one fact a line."""
        memory = "shared memory" if chip.kind == "cuda" else "Unified Buffer"
        facts = {
            "way": self.way,
            "why": self.why,
            "decided at": self.decided_at,
            "called from": self.called_from,
            "blocks": _assignments(self.blocks),
            "flags": _assignments(self.flags),
            "options": _assignments(self.options),
            memory: "" if self.memory is None else f"{self.memory:,} of {chip.ub_bytes:,} bytes",
            "falls back to": self.falls_back_to,
            "partial sums": self.partials_added_by and f"added by {self.partials_added_by}",
        }
        programs = f"{self.grid:,} programs" if self.grid != 1 else "1 program"
        head = f"{self.kernel} ({self.defined_at}), {programs}"
        return [head, *(f"    {name:<15}{fact}" for name, fact in facts.items() if fact)]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a call does on a chip.

    Attributes:
        call: the call in words.
        chip: where.
        launches: in order.
        bytes_moved: the bytes that have to cross between memory and the chip, by direction.
    """

    call: str
    chip: Device
    launches: Sequence[ExplainedLaunch]
    bytes_moved: Mapping[str, int]

    def floor(self, direction: str) -> float | None:
        """Seconds below which no launches of a direction take: its bytes / bandwidth; None where that is not known."""
        return None if self.chip.bandwidth is None else self.bytes_moved[direction] / self.chip.bandwidth

    @property
    def text(self) -> str:
        """For people."""
        lines = [f"{self.call} on {_described(self.chip)}"]
        for direction, moved in self.bytes_moved.items():
            launches = [launch for launch in self.launches if launch.direction == direction]
            floor = self.floor(direction)
            time = "" if floor is None else f": {floor * 1e6:,.1f} us at {(self.chip.bandwidth or 0) / 1e12:.3g} TB/s"
            lines += ["", f"{direction}: {_count(launches)}; at least {moved:,} bytes to and from memory{time}"]
            for launch in launches:
                lines += ["", *launch.lines(self.chip)]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text


def explain(call: str, run: Callable[[], Mapping[str, int]], chip: Device) -> Explanation:
    """Explain the launches of `run` on a chip.

    Args:
        call: the call in words.
        run: calls an operator, and its backward, with tensors on the meta device; returns the bytes that have to cross
            between memory and the chip, by direction.
        chip: where.
    """
    with dry_run(chip) as launches:
        bytes_moved = run()
    return Explanation(call=call, chip=chip, launches=explained(launches), bytes_moved=bytes_moved)


def explained(launches: Sequence[RecordedLaunch]) -> list[ExplainedLaunch]:
    """Launches with their reasons; those of one call, so that the launches that add partial sums are among them."""
    return [_explained(launch, launches[i + 1 :]) for i, launch in enumerate(launches)]


def _explained(launch: RecordedLaunch, later: Iterable[RecordedLaunch]) -> ExplainedLaunch:
    tiling = launch.tiling
    numbers = {name: value for name, value in launch.constants.items() if type(value) is int}
    blocks = {name: value for name, value in numbers.items() if _BLOCK.search(name)}
    adding = next((other.kernel for other in later if _PARTIALS in other.kernel and _share_memory(launch, other)), "")
    return ExplainedLaunch(
        direction=launch.direction,
        kernel=launch.kernel,
        module=launch.module,
        defined_at=_definition(launch.module, launch.kernel),
        called_from=launch.called_from,
        grid=launch.grid,
        blocks=blocks,
        flags={name: value for name, value in launch.constants.items() if name not in blocks},
        options=dict(launch.options),
        memory=_memory_of(tiling),
        way=str(getattr(tiling, "way", "")),
        why=getattr(tiling, "why", ""),
        decided_at=getattr(tiling, "decided_at", ""),
        falls_back_to=_difference(launch),
        partials_added_by=adding,
    )


def _memory_of(tiling: Any) -> int | None:
    device = getattr(tiling, "device", None)
    declared: int | None = getattr(tiling, "shared_bytes" if getattr(device, "kind", "") == "cuda" else "ub_bytes", None)
    return declared or None


def _difference(launch: RecordedLaunch) -> str:
    """What the fallback has other than the launch."""
    if launch.fallback is None:
        return ""
    before = {**launch.constants, **launch.options}
    after = {**launch.fallback.constants, **launch.fallback.options}
    changed = {name: value for name, value in after.items() if name not in before or before[name] != value}
    return _assignments(changed) or repr(launch.fallback)


def _share_memory(launch: RecordedLaunch, other: RecordedLaunch) -> bool:
    """Whether a kernel that adds partial sums reads, as its first argument, memory that another launch was given."""
    partials = _memory(other.arguments[0])
    return partials is not None and partials in map(_memory, launch.arguments)


def _memory(argument: Any) -> int | None:
    """The number of a tensor's storage; None of what is no tensor."""
    return argument.untyped_storage()._cdata if hasattr(argument, "untyped_storage") else None


def _definition(module: str, kernel: str) -> str:
    """File and line of a kernel, read from its source: importing it would need Triton."""
    top, *names = module.split(".")
    spec = importlib.util.find_spec(top) if top not in sys.modules else sys.modules[top].__spec__
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec is not None else []
    for folder in folders:
        for file in (folder.joinpath(*names).with_suffix(".py"), folder.joinpath(*names, "__init__.py")):
            if file.is_file():
                lines = file.read_text().splitlines()
                line = next((i for i, text in enumerate(lines, 1) if text.startswith(f"def {kernel}(")), 1)
                return f"{file.relative_to(folder.parent)}:{line}"
    return module


def _described(chip: Device) -> str:
    if chip.kind == "cuda":
        return f"{chip.name} ({chip.arch}, {chip.vector_cores} streaming multiprocessors)"
    return f"{chip.name} ({chip.vector_cores} vector cores, {chip.cube_cores} cube cores)"


def _assignments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def _count(launches: Sequence[object]) -> str:
    return "1 launch" if len(launches) == 1 else f"{len(launches)} launches"
