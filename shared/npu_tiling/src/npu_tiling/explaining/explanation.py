"""What a call launches on a chip, and why: for people (`text`), and for tests and records (`launches`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..chips.devices import Device
from ..launching.recording import Argument, RecordedLaunch, Recorder, dry_run
from .order import repeated
from .products import Call, Product, Sort, Watch
from .sources import definition

_PARTIALS = "partials"  # in the name of a kernel that adds partial sums
_BLOCK = re.compile(r"BLOCK|CHUNK|ROWS|STAGES|SHARE|^[GM]$")  # in the name of a size that the tiling chooses


@dataclass(frozen=True, kw_only=True)
class ExplainedLaunch:
    """One launch and the reasons for it.

    Attributes:
        direction: "forward" or "backward".
        kernel: its name.
        module: full name of the module that it is in.
        defined_at: file and line of the kernel.
        summary: the first line of its docstring; empty where it has none.
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
    summary: str
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

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for launches that differ in their number of programs alone."""
        return tuple(str(getattr(self, each.name)) for each in fields(self) if each.name != "grid")

    def facts(self, chip: Device) -> dict[str, str]:
        """For people."""
        memory = "shared memory" if chip.kind == "cuda" else "Unified Buffer"
        return {
            "summary": self.summary,
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


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a call does on a chip.

    Attributes:
        call: the call in words.
        chip: where.
        launches: in order.
        products: matrix products by PyTorch, in order.
        sorts: by PyTorch, in order.
        decisions: what was decided for a call of several launches, in words, by direction.
        bytes_moved: the bytes that have to cross between memory and the chip, by direction.
        flops: the operations of matrix products that the result needs, by direction.
        peak: the most bytes of memory at a time beside the call's inputs, results and gradients included.
    """

    call: str
    chip: Device
    launches: Sequence[ExplainedLaunch]
    products: Sequence[Product] = ()
    sorts: Sequence[Sort] = ()
    decisions: Sequence[tuple[str, Mapping[str, str]]] = ()
    bytes_moved: Mapping[str, int]
    flops: Mapping[str, int] = field(default_factory=dict)
    peak: int = 0

    def floor(self, direction: str) -> float | None:
        """Seconds below which no launches of a direction take, for their bytes or for their operations; None: not known."""
        chip, flops = self.chip, self.flops.get(direction, 0)
        if chip.bandwidth is None or (flops and chip.matrix_flops is None):
            return None
        return max(self.bytes_moved[direction] / chip.bandwidth, flops / (chip.matrix_flops or 1.0))

    @property
    def text(self) -> str:
        """For people: what is launched several times is described once."""
        lines = [f"{self.call} on {_described(self.chip)}"]
        lines += [f"memory beside the inputs: at most {self.peak:,} bytes at a time"] if self.peak else []
        for direction in self.bytes_moved:
            steps = self._steps(direction)
            lines += ["", f"{direction}: {self._counts(direction)}; {self._least(direction)}"]
            lines += [line for at, facts in self.decisions if at == direction for line in _lines(facts)]
            kinds = list(dict.fromkeys(step.kind for step in steps))
            order = repeated([str(kinds.index(step.kind) + 1) for step in steps])
            lines += _lines({"order": order if 1 < len(kinds) < len(steps) else ""})
            for number, kind in enumerate(kinds, 1):
                lines += ["", *self._described([step for step in steps if step.kind == kind], number)]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text

    def _steps(self, direction: str) -> list[ExplainedLaunch | Call]:
        """Launches, products and sorts in order."""
        numbered: list[tuple[int, int, ExplainedLaunch | Call]] = [(i, 1, each) for i, each in enumerate(self.launches)]
        numbered += [(each.after, 0, each) for each in (*self.products, *self.sorts)]
        return [step for *_, step in sorted(numbered, key=lambda each: each[:2]) if step.direction == direction]

    def _counts(self, direction: str) -> str:
        steps = (self.launches, self.products, self.sorts)
        launches, products, sorts = (sum(each.direction == direction for each in found) for found in steps)
        said = ["1 launch" if launches == 1 else f"{launches} launches"]
        said += [f"{products} matrix product{'s' * (products != 1)}"] if products else []
        said += [f"{sorts} sort{'s' * (sorts != 1)}"] if sorts else []
        return " and ".join(said)

    def _least(self, direction: str) -> str:
        chip, moved, flops = self.chip, self.bytes_moved[direction], self.flops.get(direction, 0)
        said = f"at least {moved:,} bytes to and from memory"
        if chip.bandwidth is not None:
            said += f": {moved / chip.bandwidth * 1e6:,.1f} us at {chip.bandwidth / 1e12:.3g} TB/s"
        if flops:
            said += f"; at least {flops:,} operations"
        if flops and chip.matrix_flops is not None:
            said += f": {flops / chip.matrix_flops * 1e6:,.1f} us at {chip.matrix_flops / 1e12:.4g} TFLOP/s"
        return said

    def _described(self, steps: Sequence[ExplainedLaunch | Call], number: int) -> list[str]:
        """Steps of one kind."""
        first, times = steps[0], f", {len(steps)} times" * (len(steps) > 1)
        if isinstance(first, Product):
            largest = max((step for step in steps if isinstance(step, Product)), key=lambda step: step.flops)
            each = f"{largest.flops:,}{' at most' * (len({step.flops for step in steps if isinstance(step, Product)}) > 1)}"
            return [f"{number}. {largest}{times}", *_lines({"called from": first.called_from, "operations": each})]
        if isinstance(first, Call):
            return [f"{number}. {first}{times}", *_lines({"called from": first.called_from})]
        grids = sorted({step.grid for step in steps if isinstance(step, ExplainedLaunch)})
        programs = "1 program" if grids == [1] else f"{' or '.join(f'{grid:,}' for grid in grids)} programs"
        head = f"{number}. {first.kernel} ({first.defined_at}), {programs}{times}"
        return [head, *_lines(first.facts(self.chip))]


def explain(
    call: str,
    run: Callable[[], Mapping[str, int]],
    chip: Device,
    *,
    flops: Mapping[str, int] | None = None,
    describe: Callable[[Any], Mapping[str, str]] | None = None,
    passed_through: Sequence[str] = (),
) -> Explanation:
    """Explain the launches of `run` on a chip.

    Args:
        call: the call in words.
        run: calls an operator, and its backward, with tensors on the meta device; returns the bytes that have to cross
            between memory and the chip, by direction.
        chip: where.
        flops: the operations of matrix products that the result needs, by direction.
        describe: puts into words what the package decides for a call of several launches (`Recorder.decided`).
        passed_through: full names of modules through which a package calls PyTorch's matrix products: callers of those are
            named.
    """
    recorder = Recorder(runs=False)
    with dry_run(chip, recorder) as launches, Watch(launches, passed_through) as watch:
        bytes_moved = run()
    return Explanation(
        call=call,
        chip=chip,
        launches=explained(launches),
        products=watch.products,
        sorts=watch.sorts,
        decisions=[(direction, describe(each)) for direction, each in recorder.decisions] if describe is not None else [],
        bytes_moved=bytes_moved,
        flops=flops or {},
        peak=watch.peak,
    )


def explained(launches: Sequence[RecordedLaunch]) -> list[ExplainedLaunch]:
    """Launches with their reasons; those of one call, so that the launches that add partial sums are among them."""
    return [_explained(launch, launches[i + 1 :]) for i, launch in enumerate(launches)]


def _explained(launch: RecordedLaunch, later: Iterable[RecordedLaunch]) -> ExplainedLaunch:
    tiling = launch.tiling
    numbers = {name: value for name, value in launch.constants.items() if type(value) is int}
    blocks = {name: value for name, value in numbers.items() if _BLOCK.search(name)}
    defined_at, summary = definition(launch.module, launch.kernel)
    adding = next((other.kernel for other in later if _adds_partials(other) and _share_memory(launch, other)), "")
    return ExplainedLaunch(
        direction=launch.direction,
        kernel=launch.kernel,
        module=launch.module,
        defined_at=defined_at,
        summary=summary,
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


def _adds_partials(launch: RecordedLaunch) -> bool:
    return _PARTIALS in launch.kernel or getattr(launch.tiling, "adds_partials", False)


def _share_memory(launch: RecordedLaunch, other: RecordedLaunch) -> bool:
    """Whether a kernel that adds partial sums reads, as its first argument, memory that another launch was given."""
    partials = other.arguments[0]
    return isinstance(partials, Argument) and any(
        isinstance(argument, Argument) and argument.memory == partials.memory for argument in launch.arguments
    )


def _described(chip: Device) -> str:
    if chip.kind == "cuda":
        return f"{chip.name} ({chip.arch}, {chip.vector_cores} streaming multiprocessors)"
    return f"{chip.name} ({chip.vector_cores} vector cores, {chip.cube_cores} cube cores)"


def _assignments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def _lines(facts: Mapping[str, str]) -> list[str]:
    """One fact a line."""
    return [f"    {name:<15}{fact}" for name, fact in facts.items() if fact]
