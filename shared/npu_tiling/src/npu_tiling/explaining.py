"""What a call does on a chip, and why, read from the plans of its operators: for people (`text`), tests and records."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from typing import Any

import torch

from .budget import place_in
from .chips import Device
from .launch import PlannedCall, dry_run
from .plans import Launch, New, Plan, Slot, Torch, slots_in

_SHORTEST = 1e-6  # seconds: no launch takes less, so a shorter time for its bytes says nothing
_PARTIALS = "p_partials"  # the first parameter of every kernel that adds partial sums
_BLOCK = re.compile(r"BLOCK|CHUNK|ROWS|STAGES|^[GM]$")  # in the name of a size that the tiling chooses
_NAMES = {"contiguous": "copy", "clone": "copy", "to": "copy", "zero": "zeros"}
# Functions for products that a plan calls: they take left, right and result, and perhaps by what the result is multiplied.
_PRODUCTS = {"mm", "mm_wide", "addmm", "addmm_wide", "widened", "multiply_pieces"}
_SHORT = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True, kw_only=True)
class Fallback:
    """What takes a launch's place where its tile does not fit.

    Attributes:
        kernel: a kernel, or an operator of PyTorch in words.
        defined_at: file and line, of another kernel than the launch's.
        changes: its `tl.constexpr` parameters and compiler options that the launch does not have, or has with other values.
    """

    kernel: str
    defined_at: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        kernel = f"{self.kernel} ({self.defined_at})" if self.defined_at else self.kernel if not self.changes else "itself"
        return f"{kernel}{' with ' * bool(self.changes)}{_assignments([self.changes])}"


@dataclass(frozen=True, kw_only=True)
class ExplainedLaunch:
    """One launch and the reasons for it.

    Attributes:
        direction: "forward" or "backward".
        kernel, module: its name, and the full name of its module.
        defined_at, summary: file and line of the kernel, and the first line of its docstring.
        called_from, caller: file and line that added the launch to the plan, and the function that has them.
        grid: number of programs.
        blocks: sizes that the tiling chose, by the name of the kernel's parameter.
        flags: the other `tl.constexpr` parameters.
        options: compiler options.
        memory: declared bytes of Unified Buffer of one program (on CUDA of shared memory); None: not declared.
        way: which of several ways; empty where there is one.
        why: the reason for it; empty where none is stated.
        decided_at: file and line of the rule or table's row; empty where it is not known.
        partials_added_by: what adds this one's partial sums, a later kernel or PyTorch's sum; empty where there are none.
        fallback: what runs in its place where its tile does not fit; empty: nothing, and an error names the tile.
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
    fallback: Sequence[Fallback] = ()

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for launches of one kernel from one place, which differ in sizes and flags."""
        return self.direction, self.module, self.kernel, self.called_from

    @property
    def parameters(self) -> dict[str, Any]:
        """`tl.constexpr` parameters and compiler options."""
        return {**self.blocks, **self.flags, **self.options}


@dataclass(frozen=True, kw_only=True)
class TorchCall:
    """A function of PyTorch that a plan calls.

    Attributes:
        direction: "forward" or "backward".
        name: of the function; a copy is "copy", whether or not the dtype changes.
        called_from: file and line that added it to the plan.
        read, written: dtypes and shapes in words.
    """

    direction: str
    name: str
    called_from: str
    read: str
    written: str

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for calls that differ in their sizes alone."""
        return self.direction, self.name, self.called_from

    @property
    def sizes(self) -> str:
        """What is read and written, in words."""
        return self.written if self.read in ("", self.written) else f"{self.read} -> {self.written}"

    def __str__(self) -> str:
        return f"PyTorch's {self.name}: {self.sizes}"


@dataclass(frozen=True, kw_only=True)
class Product(TorchCall):
    """One matrix product.

    Attributes:
        dtype, result: names of the dtypes of the operands and of the result.
        left, right: shapes of the operands.
        adds: whether it is added to what the result holds.
    """

    dtype: str
    result: str
    left: tuple[int, ...]
    right: tuple[int, ...]
    adds: bool

    @property
    def kind(self) -> tuple[object, ...]:
        return self.direction, "product", self.called_from

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * prod(self.left) * self.right[-1]

    def __str__(self) -> str:
        sign = "+=" if self.adds else "="
        return f"PyTorch's product {self.result} {sign} {self.dtype} {list(self.left)} @ {list(self.right)}"


Step = ExplainedLaunch | TorchCall
Group = Sequence[Step]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a call does on a chip.

    Attributes:
        call: the call in words.
        chip: where.
        steps: launches and functions of PyTorch, in order.
        decisions: what was decided for several launches together, in words, by direction.
        bytes_moved: the bytes that have to cross between memory and the chip, by direction.
        flops: the operations of matrix products that the result needs, by direction.
        peak: the most bytes of memory at a time beside the call's inputs, results and gradients included.
        names: what the kernels' sizes and flags are.
    """

    call: str
    chip: Device
    steps: Sequence[Step]
    decisions: Sequence[tuple[str, Mapping[str, str]]] = ()
    bytes_moved: Mapping[str, int]
    flops: Mapping[str, int] = field(default_factory=dict)
    peak: int = 0
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def launches(self) -> list[ExplainedLaunch]:
        return [step for step in self.steps if isinstance(step, ExplainedLaunch)]

    @property
    def calls(self) -> list[TorchCall]:
        """Functions of PyTorch, products among them."""
        return [step for step in self.steps if isinstance(step, TorchCall)]

    @property
    def products(self) -> list[Product]:
        return [step for step in self.steps if isinstance(step, Product)]

    def floor(self, direction: str) -> float | None:
        """Seconds below which no launches of a direction take, for their bytes or for their operations; None: not known."""
        chip, flops = self.chip, self.flops.get(direction, 0)
        if chip.bandwidth is None or (flops and chip.matrix_flops is None):
            return None
        return max(self.bytes_moved[direction] / chip.bandwidth, flops / (chip.matrix_flops or 1.0))

    @property
    def brief(self) -> str:
        """For people: each direction's way, launches, least bytes and least time, a line each."""
        lines = [f"{self.call} on {_described_chip(self.chip)}"]
        for direction in self.bytes_moved:
            steps = [step for step in self.steps if step.direction == direction]
            names = list(dict.fromkeys(step.kernel for step in steps if isinstance(step, ExplainedLaunch)))
            shown = ", ".join(names[:3]) + f", ... ({len(names)} kernels)" * (len(names) > 3)
            said = {
                **self._decided(direction),
                "runs": f"{_counts(steps)}{': ' * bool(shown)}{shown}",
                "bytes": f"at least {self.bytes_moved[direction]:,}",
                "time": self._least_time(direction),
            }
            lines += ["", f"{direction}:", *_lines(said)]
        return "\n".join(lines)

    def _decided(self, direction: str) -> dict[str, str]:
        """The way, and the chunks, of a decision about several launches; or the first launch's that has a way, and why."""
        for at, said in self.decisions:
            if at == direction and "way" in said:
                return {name: said[name] for name in ("way", "chunks", "why these") if name in said}
        launches = [each for each in self.launches if each.direction == direction]
        for each in launches:
            if each.way:
                return {"way": f"{each.way}: {each.why}"}
        return {"why": launches[0].why if launches else ""}

    def _least_time(self, direction: str) -> str:
        floor = self.floor(direction)
        if floor is None:
            return ""
        if floor < _SHORTEST:
            return "that of the launches, which take longer than the bytes"
        of = "bytes" if self.bytes_moved[direction] / (self.chip.bandwidth or 1.0) == floor else "matrix products"
        return f"at least {floor * 1e6:,.1f} us, for the {of}"

    @property
    def text(self) -> str:
        """For people: everything. What is launched several times is described once."""
        lines = [f"{self.call} on {_described_chip(self.chip)}"]
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
        if chip.bandwidth is not None and moved / chip.bandwidth >= _SHORTEST:
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
            return [head, *_lines(_facts(launches, self.chip))]
        if isinstance(first, Product):
            products = [step for group in groups for step in group if isinstance(step, Product)]
            largest = max(products, key=lambda step: step.flops)
            most = " at most" * (len({step.flops for step in products}) > 1)
            return [
                f"{number}. {largest}{times}",
                *_lines({"called from": first.called_from, "operations": f"{largest.flops:,}{most}"}),
            ]
        heads = [f"{step.name:<14} {step.sizes}, {step.called_from}" for step in groups[0] if isinstance(step, TorchCall)]
        return [f"{number}. PyTorch's operators{times}", *(f"    {head}" for head in dict.fromkeys(heads))]


def explain(
    call: str,
    run: Callable[[], Mapping[str, int]],
    chip: Device,
    *,
    flops: Mapping[str, int] | None = None,
    describe: Callable[[Any], Mapping[str, str]] | None = None,
    names: Mapping[str, str] | None = None,
) -> Explanation:
    """Explain what `run` does on a chip.

    Args:
        call: the call in words.
        run: calls an operator, and its backward, with tensors on the meta device; returns the bytes that have to cross
            between memory and the chip, by direction.
        chip: where.
        flops: the operations of matrix products that the result needs, by direction.
        describe: puts into words a decision of a plan that no launch has for its tiling.
        names: what the kernels' sizes and flags are.
    """
    with dry_run(chip) as calls:
        bytes_moved = run()
    larger = [(each.direction, tiling) for each in calls for tiling in _larger(each.plan)]
    return Explanation(
        call=call,
        chip=chip,
        steps=explained(calls),
        decisions=[(direction, describe(tiling)) for direction, tiling in larger] if describe is not None else [],
        bytes_moved=bytes_moved,
        flops=flops or {},
        peak=_peak([each.plan for each in calls]),
        names=names or {},
    )


def explained(calls: Sequence[PlannedCall]) -> list[Step]:
    """The steps of calls with their reasons, and what runs where a tile does not fit."""
    return [step for call in calls for step in _with_fallbacks(call, _steps(call.direction, call.plan))]


def _larger(plan: Plan) -> list[Any]:
    """Decisions about several launches: no launch has one of these for its tiling."""
    of_launches = {step.decision.name for step in plan.steps if isinstance(step, Launch)}
    return [tiling for name, (tiling, _) in plan.decisions.items() if name not in of_launches]


def _steps(direction: str, plan: Plan) -> list[Step]:
    found: list[Step] = []
    for i, step in enumerate(plan.steps):
        if isinstance(step, Launch):
            found.append(_explained(direction, step, plan.steps[i + 1 :]))
        elif isinstance(step, Torch):
            found.append(_called(direction, step))
    return found


def _explained(direction: str, launch: Launch, later: Sequence[Any]) -> ExplainedLaunch:
    tiling, constants = launch.decision.tiling, launch.decision.constants
    numbers = {name: value for name, value in constants.items() if type(value) is int}
    blocks = {name: value for name, value in numbers.items() if _BLOCK.search(name)}
    defined_at, summary = _defined(launch.full_module, launch.kernel)
    return ExplainedLaunch(
        direction=direction,
        kernel=launch.kernel,
        module=launch.full_module,
        defined_at=defined_at,
        summary=summary,
        called_from=launch.origin.place,
        caller=launch.origin.function,
        grid=launch.grid,
        blocks=blocks,
        flags={name: value for name, value in constants.items() if name not in blocks},
        options=dict(launch.decision.options),
        memory=_memory_of(tiling),
        way=str(tiling.way),
        why=getattr(tiling, "why", ""),
        decided_at=getattr(tiling, "decided_at", ""),
        partials_added_by=_adder(launch, later),
    )


@functools.cache
def _defined(module: str, kernel: str) -> tuple[str, str]:
    """Where a kernel is defined, file and line, and the first line of its docstring; the module where it is not loaded."""
    function = getattr(sys.modules.get(module), kernel, None)
    function = getattr(function, "fn", function)
    if function is None:
        return module, ""
    lines, first = inspect.getsourcelines(function)
    first += next(i for i, line in enumerate(lines) if line.startswith("def "))  # decorators come before
    return place_in(inspect.getfile(function), module, first), (function.__doc__ or "").partition("\n")[0]


def _called(direction: str, step: Torch) -> TorchCall:
    written = [*step.writes, *filter(None, step.made)]
    numbers = {slot.number for slot in step.writes}
    read = [slot for slot in slots_in(step.arguments) if slot.number not in numbers]
    name = _name_of(step)
    place: dict[str, Any] = {
        "direction": direction,
        "name": _NAMES.get(name, name),
        "called_from": step.origin.place,
        "read": _described(read),
        "written": _described(written),
    }
    if name not in _PRODUCTS:
        return TorchCall(**place)
    left, right, result = step.arguments[:3]
    return Product(
        **place,
        dtype=short(left.dtype),
        result=short(result.dtype),
        left=left.shape,
        right=right.shape,
        adds=bool(step.arguments[3:4] and step.arguments[3]),
    )


def _name_of(step: Torch) -> str:
    """The name of the step's function."""
    name: str = getattr(step.function, "func", step.function).__name__  # of a functools.partial, that of its function
    return name.strip("_")


def _memory_of(tiling: Any) -> int | None:
    device = getattr(tiling, "device", None)
    declared: int | None = getattr(tiling, "shared_bytes" if getattr(device, "kind", "") == "cuda" else "ub_bytes", None)
    return declared or None


def _adder(launch: Launch, later: Sequence[Any]) -> str:
    """What adds partial sums that a launch wrote: a kernel, or PyTorch's sum of them."""
    written = {slot.base for slot in slots_in(launch.writes.values())}
    for step in later:
        if isinstance(step, Launch):
            partials = step.reads.get(_PARTIALS)
            if isinstance(partials, Slot) and partials.base in written:
                return step.kernel
        elif isinstance(step, Torch) and step.made:
            if written & {slot.base for slot in slots_in(step.arguments)}:
                name = _name_of(step)
                if name.startswith("sum"):
                    return f"PyTorch's sum ({step.origin.place})"
                if name in _NAMES:
                    written.update(slot.base for slot in filter(None, step.made))
    return ""


def _with_fallbacks(call: PlannedCall, steps: list[Step]) -> list[Step]:
    """Steps with what runs in a launch's place where its tile does not fit: the call is planned again with it refused."""
    found: dict[tuple[str, Any], list[Step]] = {}
    launches = iter([step for step in call.plan.steps if isinstance(step, Launch)])
    result: list[Step] = []
    for step in steps:
        if isinstance(step, ExplainedLaunch):
            decision = next(launches).decision
            following, key = decision.tiling.smaller(), (decision.name, decision.tiling)
            if following is not None:
                if key not in found:
                    found[key] = _new(_steps(call.direction, call.replan({key: following})), steps)
                step = _replaced_by(step, found[key])
        result.append(step)
    return result


def _replaced_by(launch: ExplainedLaunch, new: Sequence[Step]) -> ExplainedLaunch:
    """The launch with what it is replaced by: its own kernel, changed the least, or else all new launches."""
    before = launch.parameters
    launches = [step for step in new if isinstance(step, ExplainedLaunch)]
    same = [each for each in launches if each.defined_at == launch.defined_at]
    found = []
    for step in same or launches:
        changes = {name: value for name, value in step.parameters.items() if name not in before or before[name] != value}
        found.append(Fallback(kernel=step.kernel, defined_at="" if same else step.defined_at, changes=changes))
    if same:
        found = [min(found, key=lambda fallback: len(fallback.changes))]
    return dataclasses.replace(launch, fallback=found or [Fallback(kernel="PyTorch's operators")])


def _new(steps: Sequence[Step], before: Sequence[Step]) -> list[Step]:
    """Steps that were not there before, each once."""
    known = Counter(map(_identity, before))
    new = {_identity(step): step for step in steps if not _counted(known, step)}
    return list(new.values())


def _counted(known: Counter[Any], step: Step) -> bool:
    known[_identity(step)] -= 1
    return known[_identity(step)] >= 0


def _identity(step: Step) -> tuple[Any, ...]:
    """Equal for steps that do the same on the same shapes."""
    return *step.kind, str(step) if isinstance(step, TorchCall) else _assignments([step.parameters])


def _peak(plans: Sequence[Plan]) -> int:
    """The most bytes at a time that plans make, one after the other: results stay, other memory ends with its last use."""
    kept = most = 0
    for plan in plans:
        alive, now = {}, kept
        for step, ended in zip(plan.steps, plan.last_uses(), strict=True):
            made_here = (step.slot,) if isinstance(step, New) else step.made if isinstance(step, Torch) else ()
            for made in made_here:
                if made is None or made.block:  # a descriptor is no memory
                    continue
                alive[made.number] = made.numel() * made.dtype.itemsize
                now += alive[made.number]
            most = max(most, now)
            now -= sum(alive.pop(number, 0) for number in ended)
        kept = now
    return most


def _facts(launches: Sequence[ExplainedLaunch], chip: Device) -> dict[str, str]:
    """Of launches of one kind, for people."""
    memory, first = "shared memory" if chip.kind == "cuda" else "Unified Buffer", launches[0]
    bytes_of = _different(f"{each.memory:,}" for each in launches if each.memory is not None)
    fallbacks = ["; ".join(map(str, each.fallback)) for each in launches]
    return {
        "summary": first.summary,
        "way": _different(each.way for each in launches),
        "why": _different(each.why for each in launches),
        "decided at": _different(each.decided_at for each in launches),
        "called from": f"{first.called_from}, {first.caller}",
        "blocks": _assignments([each.blocks for each in launches]),
        "flags": _assignments([each.flags for each in launches]),
        "options": _assignments([each.options for each in launches]),
        memory: bytes_of and f"{bytes_of} of {chip.ub_bytes:,} bytes",
        "falls back to": _different(each or "nothing" for each in fallbacks) if any(fallbacks) else "",
        "partial sums": (adding := _different(each.partials_added_by for each in launches)) and f"added by {adding}",
    }


def _grouped(steps: Sequence[Step]) -> list[Group]:
    """Steps as they are described: a launch, a product, or other functions of PyTorch that follow one another."""
    alone = itertools.count()
    return [list(group) for _, group in groupby(steps, lambda step: -1 if type(step) is TorchCall else next(alone))]


def _kind(group: Group) -> tuple[object, ...]:
    return tuple(dict.fromkeys(step.kind for step in group))


def _counts(steps: Sequence[Step]) -> str:
    launches = sum(isinstance(step, ExplainedLaunch) for step in steps)
    products = sum(isinstance(step, Product) for step in steps)
    others = len(steps) - launches - products
    said = ["1 launch" if launches == 1 else f"{launches} launches"]
    said += [f"{products} matrix product{'s' * (products != 1)}"] if products else []
    said += [f"{others} {'other ' * (products > 0)}operator{'s' * (others != 1)} by PyTorch"] if others else []
    return f"{', '.join(said[:-1])} and {said[-1]}" if len(said) > 1 else said[0]


def repeated(names: Sequence[str]) -> str:
    """Names in order; what follows itself is named once: "1; 8 times (2, 3); 4"."""
    said: list[str] = []
    first = 0
    while first < len(names):
        count, length = max(
            ((_repetitions(names[first:], length), length) for length in range(1, (len(names) - first) // 2 + 1)),
            key=lambda found: (found[0] > 1) * found[0] * found[1],
            default=(1, 1),
        )
        if count == 1:
            length = 1
        group = ", ".join(names[first : first + length])
        said.append(f"{count} times ({group})" if count > 1 else group)
        first += count * length
    return "; ".join(said)


def _repetitions(names: Sequence[str], length: int) -> int:
    """How many times in a row a list starts with its first `length` names."""
    count = 1
    while names[count * length : (count + 1) * length] == names[:length]:
        count += 1
    return count


def _described(slots: Iterable[Slot]) -> str:
    """Dtypes and shapes; equal ones that follow one another are counted."""
    names = groupby(f"{short(slot.dtype)} {list(slot.shape)}" for slot in slots)
    counted = [(name, sum(1 for _ in each)) for name, each in names]
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counted)


def short(dtype: torch.dtype) -> str:
    """The name of a dtype as people write it."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def _described_chip(chip: Device) -> str:
    if chip.kind == "cuda":
        return f"{chip.name} ({chip.arch}, {chip.vector_cores} streaming multiprocessors)"
    return f"{chip.name} ({chip.vector_cores} vector cores, {chip.cube_cores} cube cores)"


def _lines(facts: Mapping[str, str]) -> list[str]:
    """One fact a line."""
    width = max(14, *map(len, facts)) + 1 if facts else 0
    return [f"    {name:<{width}}{fact}" for name, fact in facts.items() if fact]


def _assignments(values: Sequence[Mapping[str, Any]]) -> str:
    """Values by name, "BLOCK_M=2, FIRST=True or False"."""
    names = dict.fromkeys(name for each in values for name in each)
    return ", ".join(f"{name}={_different(str(each[name]) or '-' for each in values if name in each)}" for name in names)


def _different(values: Iterable[str]) -> str:
    """Each value once."""
    return " or ".join(filter(None, dict.fromkeys(values)))
