"""Launches with their reasons: for people (`facts`), and for tests and records."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..chips.devices import Device
from ..launching.recording import Argument, Attempt, RecordedLaunch
from .operators import COPY, SUM, Call, Product
from .sources import definition

_PARTIALS = "p_partials"  # the first parameter of every kernel that adds partial sums
_BLOCK = re.compile(r"BLOCK|CHUNK|ROWS|STAGES|SHARE|^[GM]$")  # in the name of a size that the tiling chooses


@dataclass(frozen=True, kw_only=True)
class Fallback:
    """What takes a launch's place where its tile does not fit.

    Attributes:
        kernel: a kernel, or an operator of PyTorch's in words.
        defined_at: file and line, of another kernel than the launch's.
        changes: its `tl.constexpr` parameters and compiler options that the launch does not have, or has with other values.
    """

    kernel: str
    defined_at: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        kernel = f"{self.kernel} ({self.defined_at})" if self.defined_at else self.kernel if not self.changes else "itself"
        return f"{kernel}{' with ' * bool(self.changes)}{assignments([self.changes])}"


@dataclass(frozen=True, kw_only=True)
class ExplainedLaunch:
    """One launch and the reasons for it.

    Attributes:
        direction: "forward" or "backward".
        kernel: its name.
        module: full name of the module that it is in.
        defined_at: file and line of the kernel.
        summary: the first line of its docstring; empty where it has none.
        called_from, caller: file and line of the code that launches it, and the function that has them.
        grid: number of programs.
        blocks: sizes that the tiling chose, by the name of the kernel's parameter.
        flags: the other `tl.constexpr` parameters.
        options: compiler options.
        memory: declared bytes of Unified Buffer of one program (on CUDA of shared memory); None: not declared.
        way: which of several ways; empty where there is one.
        why: the reason for it; empty where none is stated.
        decided_at: file and line of the rule or table's row; empty where it is not known.
        partials_added_by: what adds this one's partial sums, a later kernel or PyTorch's sum; empty where there are none.
        fallback: what runs in its place where its tile does not fit; empty: nothing, and an error names the tile. Known of
            dry runs alone.
    """

    direction: str
    kernel: str
    module: str
    defined_at: str
    summary: str
    called_from: str
    caller: str
    grid: int
    blocks: Mapping[str, Any]
    flags: Mapping[str, Any]
    options: Mapping[str, Any]
    memory: int | None
    way: str
    why: str
    decided_at: str
    partials_added_by: str
    fallback: Sequence[Fallback] = field(default=(), compare=False)

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for launches of one kernel from one place, which differ in sizes and flags."""
        return self.direction, self.module, self.kernel, self.called_from


def facts(launches: Sequence[ExplainedLaunch], chip: Device) -> dict[str, str]:
    """Of launches of one kind, for people."""
    memory, first = "shared memory" if chip.kind == "cuda" else "Unified Buffer", launches[0]
    bytes_of = _different(f"{each.memory:,}" for each in launches if each.memory is not None)
    adding = _different(each.partials_added_by for each in launches)
    return {
        "summary": first.summary,
        "way": _different(each.way for each in launches),
        "why": _different(each.why for each in launches),
        "decided at": _different(each.decided_at for each in launches),
        "called from": f"{first.called_from}, {first.caller}",
        "blocks": assignments([each.blocks for each in launches]),
        "flags": assignments([each.flags for each in launches]),
        "options": assignments([each.options for each in launches]),
        memory: bytes_of and f"{bytes_of} of {chip.ub_bytes:,} bytes",
        "falls back to": _different("; ".join(map(str, each.fallback)) or "nothing" for each in launches),
        "partial sums": adding and f"added by {adding}",
    }


def explained(launches: Sequence[RecordedLaunch], calls: Sequence[Call] = ()) -> list[ExplainedLaunch]:
    """Launches with their reasons; those of one call, with PyTorch's operators: some of them add others' partial sums."""
    return [
        _explained(launch, launches[i + 1 :], [call for call in calls if call.after > i])
        for i, launch in enumerate(launches)
    ]


def _explained(launch: RecordedLaunch, later: Iterable[RecordedLaunch], calls: Sequence[Call]) -> ExplainedLaunch:
    tiling = launch.tiling
    why, decided_at = _reason(tiling)
    numbers = {name: value for name, value in launch.constants.items() if type(value) is int}
    blocks = {name: value for name, value in numbers.items() if _BLOCK.search(name)}
    source = definition(launch.module, launch.kernel)
    return ExplainedLaunch(
        direction=launch.direction,
        kernel=launch.kernel,
        module=launch.module,
        defined_at=source.place,
        summary=source.summary,
        called_from=launch.called_from,
        caller=launch.caller,
        grid=launch.grid,
        blocks=blocks,
        flags={name: value for name, value in launch.constants.items() if name not in blocks},
        options=dict(launch.options),
        memory=_memory_of(tiling),
        way=str(getattr(tiling, "way", "")),
        why=why,
        decided_at=decided_at,
        partials_added_by=_adder(launch, later, calls),
    )


def _reason(tiling: Any) -> tuple[str, str]:
    """Why, and file and line: of the tiling; where it says none, of its class, which computes the sizes."""
    if tiling is None:
        return "", ""
    kind = type(tiling)
    summary = (kind.__doc__ or "").partition("\n")[0].rstrip(".")
    place = f"{kind.__module__.replace('.', '/')}.py:{kind.constants.fget.__code__.co_firstlineno}"
    return getattr(tiling, "why", "") or summary, getattr(tiling, "decided_at", "") or place


def _memory_of(tiling: Any) -> int | None:
    device = getattr(tiling, "device", None)
    declared: int | None = getattr(tiling, "shared_bytes" if getattr(device, "kind", "") == "cuda" else "ub_bytes", None)
    return declared or None


def _adder(launch: RecordedLaunch, later: Iterable[RecordedLaunch], calls: Sequence[Call]) -> str:
    """What adds partial sums in memory that a launch was given: a kernel, or PyTorch's sum of what no product reads."""
    own = _partials(launch)
    given = {each.memory for each in launch.arguments if isinstance(each, Argument) and each.memory != own}
    for other in later:
        if _partials(other) in given:
            return other.kernel
    given -= {memory for call in calls if isinstance(call, Product) for memory in call.reads}
    for call in calls:
        if given & call.reads and _package(call.called_from) == _package(launch.called_from):
            if call.name == SUM:
                return f"PyTorch's sum ({call.called_from})"
            if call.name == COPY:
                given |= call.writes
    return ""


def _partials(launch: RecordedLaunch) -> int | None:
    """The memory of the partial sums that a launch adds; None: it adds none."""
    first = launch.arguments[0]
    adds = definition(launch.module, launch.kernel).parameters[:1] == (_PARTIALS,)
    return first.memory if adds and isinstance(first, Argument) else None


def _package(place: str) -> str:
    return place.partition("/")[0]


def with_fallbacks(
    launches: Sequence[ExplainedLaunch],
    recorded: Sequence[RecordedLaunch],
    rerun: Callable[[Attempt], Sequence[Any]],
    steps: Sequence[Any],
) -> list[ExplainedLaunch]:
    """Launches with what runs in their place where their tile does not fit.

    Args:
        launches, recorded: the same launches.
        steps: all of the call: explained launches and PyTorch's operators.
        rerun: runs the call again, with an attempt refused; returns its steps.
    """
    found: dict[Attempt, list[Any]] = {}
    for launch in recorded:
        if launch.attempt is not None and launch.attempt not in found:
            found[launch.attempt] = _new(rerun(launch.attempt), steps)
    return [
        launch if made.attempt is None else replace(launch, fallback=_fallback(launch, found[made.attempt]))
        for launch, made in zip(launches, recorded, strict=True)
    ]


def _new(steps: Sequence[Any], before: Sequence[Any]) -> list[Any]:
    """Steps that were not there before, each once."""
    known = Counter(map(_identity, before))
    new = {_identity(step): step for step in steps if not _counted(known, step)}
    return list(new.values())


def _counted(known: Counter[Any], step: Any) -> bool:
    known[_identity(step)] -= 1
    return known[_identity(step)] >= 0


def _identity(step: Any) -> tuple[Any, ...]:
    """Equal for steps that do the same on the same shapes."""
    if isinstance(step, Call):
        return *step.kind, str(step)
    return *step.kind, assignments([{**step.blocks, **step.flags, **step.options}])


def _fallback(launch: ExplainedLaunch, steps: Sequence[Any]) -> list[Fallback]:
    """What a launch is replaced by: its own kernel where that is among new steps, else all of them."""
    before = {**launch.blocks, **launch.flags, **launch.options}
    steps = [step for step in steps if step.direction == launch.direction]
    new = [step for step in steps if isinstance(step, ExplainedLaunch)]
    same = [each for each in new if each.defined_at == launch.defined_at]
    found = []
    for step in same or new:
        after = {**step.blocks, **step.flags, **step.options}
        changes = {name: value for name, value in after.items() if name not in before or before[name] != value}
        found.append(Fallback(kernel=step.kernel, defined_at="" if same else step.defined_at, changes=changes))
    return found or [Fallback(kernel="PyTorch's operators")]


def assignments(values: Sequence[Mapping[str, Any]]) -> str:
    """Values by name, "BLOCK_M=2, FIRST=True or False"."""
    names = dict.fromkeys(name for each in values for name in each)
    return ", ".join(f"{name}={_different(str(each[name]) for each in values if name in each)}" for name in names)


def _different(values: Iterable[str]) -> str:
    """Each value once."""
    return " or ".join(filter(None, dict.fromkeys(values)))
