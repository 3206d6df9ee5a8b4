"""What a call does on a chip, and why: for people (`text`), and for tests and records (`launches`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from ..chips.devices import Device
from ..launching.recording import Attempt, Recorder, dry_run
from .launches import ExplainedLaunch, explained, facts, with_fallbacks
from .operators import Call, Product, Watch
from .order import repeated

Step = ExplainedLaunch | Call
Group = Sequence[Step]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a call does on a chip.

    Attributes:
        call: the call in words.
        chip: where.
        launches: in order.
        calls: of PyTorch's operators, in order.
        decisions: what was decided for a call of several launches, in words, by direction.
        bytes_moved: the bytes that have to cross between memory and the chip, by direction.
        flops: the operations of matrix products that the result needs, by direction.
        peak: the most bytes of memory at a time beside the call's inputs, results and gradients included.
        names: what the kernels' sizes and flags are.
    """

    call: str
    chip: Device
    launches: Sequence[ExplainedLaunch]
    calls: Sequence[Call] = ()
    decisions: Sequence[tuple[str, Mapping[str, str]]] = ()
    bytes_moved: Mapping[str, int]
    flops: Mapping[str, int] = field(default_factory=dict)
    peak: int = 0
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def products(self) -> list[Product]:
        """PyTorch's matrix products, in order."""
        return [call for call in self.calls if isinstance(call, Product)]

    @property
    def steps(self) -> list[Step]:
        """Launches and PyTorch's operators, in order."""
        numbered: list[tuple[int, int, Step]] = [(i, 1, each) for i, each in enumerate(self.launches)]
        numbered += [(each.after, 0, each) for each in self.calls]
        return [step for *_, step in sorted(numbered, key=lambda each: each[:2])]

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
        memory = f"memory beside the inputs, with results and gradients: at most {self.peak:,} bytes at a time"
        lines += [memory] if self.peak else []
        for direction in self.bytes_moved:
            steps = [step for step in self.steps if step.direction == direction]
            groups = _grouped(steps)
            lines += ["", f"{direction}: {_counts(steps)}; {self._least(direction)}"]
            lines += [line for at, said in self.decisions if at == direction for line in _lines(said)]
            kinds = list(dict.fromkeys(map(_kind, groups)))
            numbers = [str(kinds.index(_kind(group)) + 1) for group in groups]
            lines += _lines({"order": repeated(numbers)} if sum(1 for _ in groupby(numbers)) > len(kinds) else {})
            for number, kind in enumerate(kinds, 1):
                lines += ["", *self._lines_of([group for group in groups if _kind(group) == kind], number)]
        return "\n".join([*lines, *self._legend()])

    def __str__(self) -> str:
        return self.text

    def _legend(self) -> list[str]:
        """What the names of sizes and flags mean."""
        used = dict.fromkeys(name for each in self.launches for name in (*each.blocks, *each.flags))
        said = _lines({name: self.names.get(name, "") for name in used})
        return ["", "names:", *said] if said else []

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

    def _lines_of(self, groups: Sequence[Group], number: int) -> list[str]:
        """Groups of one kind."""
        times, first = f", {len(groups)} times" * (len(groups) > 1), groups[0][0]
        if isinstance(first, ExplainedLaunch):
            launches = [step for group in groups for step in group if isinstance(step, ExplainedLaunch)]
            grids = sorted({launch.grid for launch in launches})
            programs = "1 program" if grids == [1] else f"{' or '.join(f'{grid:,}' for grid in grids)} programs"
            head = f"{number}. {first.kernel} ({first.defined_at}), {programs}{times}"
            return [head, *_lines(facts(launches, self.chip))]
        if isinstance(first, Product):
            products = [step for group in groups for step in group if isinstance(step, Product)]
            largest = max(products, key=lambda step: step.flops)
            most = " at most" * (len({step.flops for step in products}) > 1)
            return [
                f"{number}. {largest}{times}",
                *_lines({"called from": first.called_from, "operations": f"{largest.flops:,}{most}"}),
            ]
        heads = [f"{step.name:<14} {step.sizes}, {step.called_from}" for step in groups[0] if isinstance(step, Call)]
        return [f"{number}. PyTorch's operators{times}", *(f"    {head}" for head in dict.fromkeys(heads))]


def _grouped(steps: Sequence[Step]) -> list[Group]:
    """Steps as they are described: a launch, a product, or other operators of PyTorch's that follow one another."""
    alone = itertools.count()
    return [list(group) for _, group in groupby(steps, lambda step: -1 if type(step) is Call else next(alone))]


def _kind(group: Group) -> tuple[object, ...]:
    return tuple(dict.fromkeys(step.kind for step in group))


def explain(
    call: str,
    run: Callable[[], Mapping[str, int]],
    chip: Device,
    *,
    flops: Mapping[str, int] | None = None,
    describe: Callable[[Any], Mapping[str, str]] | None = None,
    passed_through: Sequence[str] = (),
    names: Mapping[str, str] | None = None,
) -> Explanation:
    """Explain the launches of `run` on a chip.

    Args:
        call: the call in words.
        run: calls an operator, and its backward, with tensors on the meta device; returns the bytes that have to cross
            between memory and the chip, by direction.
        chip: where.
        flops: the operations of matrix products that the result needs, by direction.
        describe: puts into words what the package decides for a call of several launches (`Recorder.decided`).
        passed_through: full names of modules through which a package calls PyTorch's operators: callers of those are named.
        names: what the kernels' sizes and flags are.
    """
    recorder, watch, bytes_moved = _run(run, chip, passed_through)
    found = Explanation(
        call=call,
        chip=chip,
        launches=explained(recorder.launches, watch.calls),
        calls=watch.calls,
        decisions=[(direction, describe(each)) for direction, each in recorder.decisions] if describe is not None else [],
        bytes_moved=bytes_moved,
        flops=flops or {},
        peak=watch.peak,
        names=names or {},
    )

    def rerun(attempt: Attempt) -> list[Step]:
        other, calls, _ = _run(run, chip, passed_through, frozenset({attempt}))
        return [*explained(other.launches), *calls.calls]

    return replace(found, launches=with_fallbacks(found.launches, recorder.launches, rerun, found.steps))


def _run(
    run: Callable[[], Any], chip: Device, passed_through: Sequence[str], refused: frozenset[Attempt] = frozenset()
) -> tuple[Recorder, Watch, Any]:
    recorder = Recorder(runs=False, refused=refused)
    with dry_run(chip, recorder) as launches, Watch(launches, passed_through) as watch:
        result = run()
    return recorder, watch, result


def _counts(steps: Sequence[Step]) -> str:
    launches = sum(isinstance(step, ExplainedLaunch) for step in steps)
    products = sum(isinstance(step, Product) for step in steps)
    others = len(steps) - launches - products
    said = ["1 launch" if launches == 1 else f"{launches} launches"]
    said += [f"{products} matrix product{'s' * (products != 1)}"] if products else []
    said += [f"{others} {'other ' * (products > 0)}operator{'s' * (others != 1)} by PyTorch"] if others else []
    return f"{', '.join(said[:-1])} and {said[-1]}" if len(said) > 1 else said[0]


def _described(chip: Device) -> str:
    if chip.kind == "cuda":
        return f"{chip.name} ({chip.arch}, {chip.vector_cores} streaming multiprocessors)"
    return f"{chip.name} ({chip.vector_cores} vector cores, {chip.cube_cores} cube cores)"


def _lines(facts: Mapping[str, str]) -> list[str]:
    """One fact a line."""
    return [f"    {name:<15}{fact}" for name, fact in facts.items() if fact]
