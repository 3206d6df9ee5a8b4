"""What a call does on a chip, as data: a `Plan` lists the call's steps in order. Steps refer to slots, and not to tensors.

There are four kinds of step: `New` allocates memory, `View` gives memory another shape or dtype, `Launch` launches a kernel,
and `Torch` calls a function in PyTorch (a copy, a product, a sort, a collective). An operator writes a plan once for all
calls with one key. `run_plan` runs its steps, operators.py makes a Python function of them, and tests read them.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from . import launch as launching
from .budget import place_in
from .calls import Empty, flat
from .chips import dry_runs
from .launch import Decision, Kernels, kernels_of, signature_of
from .rows import is_contiguous


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for a tensor in a plan: shape, strides and dtype, without memory.

    Attributes:
        number: 0 to n - 1 for the n tensors of the call (None has a number too); steps make the others.
        base: the number of the slot that owns the memory: another one for a view, else its own.
        start: the distance, in elements, from the base's first element to this slot's.
        block: of a descriptor, the shape of its tiles; empty for a tensor.
    """

    number: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    base: int
    start: int = 0
    block: tuple[int, ...] = ()

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return prod(self.shape)

    def is_contiguous(self) -> bool:
        return is_contiguous(self.shape, self.strides)


class Neighbours(tuple[Tensor, ...]):
    """Tensors on a CPU that an emulated kernel reaches through one pointer, that of the first.

    An emulation checks that a kernel stays inside the tensors that it is given; a pointer on a device reaches anything.
    """

    @property
    def dtype(self) -> torch.dtype:
        return self[0].dtype

    @property
    def device(self) -> torch.device:
        return self[0].device

    def data_ptr(self) -> int:
        return self[0].data_ptr()


class Reached(tuple[Slot, ...]):
    """Slots that a kernel reaches through one pointer, that of the first: another argument has the distances."""


class Distance(NamedTuple):
    """A number of a launch that only a run knows: elements from the first element of one slot to that of another.

    The kernel's parameter has a type, `tl.int64`, and is not specialised.
    """

    first: Slot
    to: Slot

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.to.dtype.itemsize


Number: TypeAlias = int | float | Distance | None

Given: TypeAlias = Slot | tuple[Slot, ...] | None
"""What a launch is given for a pointer: a slot, a tuple of them, `Reached`, or None."""


class Origin(NamedTuple):
    """The line of code that added a step to a plan.

    Attributes:
        module: the full name of the line's module.
        file, function, line: the file, the function and the number of the line.
    """

    module: str
    file: str
    function: str
    line: int

    @property
    def place(self) -> str:
        """File and line, the file from its package's folder on."""
        return place_in(self.file, self.module, self.line)


class New(NamedTuple):
    """Allocate memory."""

    slot: Slot
    origin: Origin


class View(NamedTuple):
    """Make a slot that shares another slot's memory; of another dtype it has the memory's bits."""

    slot: Slot
    origin: Origin


class Torch(NamedTuple):
    """Call `function` with slots, lists and records of slots, and constants.

    Attributes:
        made: the slots of the tensors that the function returns: none, one, or those of a sequence, with None for None.
        writes: those of its arguments that it writes to.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    made: tuple[Slot | None, ...]
    writes: tuple[Slot, ...]
    origin: Origin


class Launch(NamedTuple):
    """Launch a kernel.

    Attributes:
        kernels, module, kernel: a package's kernels, the module in the package, and the kernel's name.
        decision: its tiling.
        grid: number of programs.
        reads, writes: slots, or tuples of them, by the name of the kernel's parameter; None: the call has no such tensor.
        slots, numbers: the kernel's arguments in its order: all slots, then the numbers.
        origin: the line of code that added the step.
    """

    kernels: Kernels
    module: str
    kernel: str
    decision: Decision
    grid: int
    reads: Mapping[str, Given]
    writes: Mapping[str, Given]
    slots: tuple[Given, ...]
    numbers: tuple[Number, ...]
    origin: Origin

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The kernel's arguments in its order, but for constants."""
        return (*self.slots, *self.numbers)

    @property
    def full_module(self) -> str:
        """The full name of the kernel's module."""
        return f"{self.kernels.package}.{self.module}"


Step = New | View | Torch | Launch


@dataclass
class Plan:
    """The steps of a call. An operator's functions add them with the methods below.

    Attributes:
        chip: the chip that it is for; None: plain PyTorch computes, and there are no launches.
        device: of the call's tensors.
        unaligned: numbers of the call's tensors, in no list, whose addresses are no multiples of `direct.ALIGNMENT`.
        tiles: tilings by the name of their decision, which take the place of those that tables choose.
        replaced: from a decision's name and a refused tiling to the tiling that takes its place.
        arguments: slots of the call's tensors, those of lists one by one; None for None.
        steps: in the order in which they run.
        results: slots of the call's results, lists of them, or None for what is not asked for.
        decisions: by name the latest tiling, and the number of the first step that depends on it.
        aligned_lists: whether the tensors of the call's lists are aligned (`calls.are_aligned`).
        is_direct: whether all of its kernels can be called without Triton's JIT; False until an `Operator` has looked.
    """

    chip: Any  # Device | None; an operator with a reference of its own plans for chips alone
    tiles: Mapping[str, Any] = field(default_factory=dict)
    replaced: Mapping[Any, Any] = field(default_factory=lambda: launching.replaced)
    device: torch.device = field(default_factory=lambda: torch.device("meta"))
    unaligned: set[int] = field(default_factory=set)
    arguments: list[Slot | None] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    results: tuple[Any, ...] = ()
    decisions: dict[str, tuple[Any, int]] = field(default_factory=dict)
    aligned_lists: bool = True
    is_direct: bool = False
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _overwritten: set[int] = field(default_factory=set)  # arguments that a step has written to

    def argument(self, tensor: Any) -> Slot | None:
        """Adds the slot of one of the call's tensors, None for None."""
        number, slot = next(self._numbers), None
        if tensor is not None:
            slot = Slot(number, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, number)
        self.arguments.append(slot)
        return slot

    def is_aligned(self, slot: Slot) -> bool:
        """Whether the memory of a slot begins at a multiple of `direct.ALIGNMENT`, as descriptors ask for."""
        return slot.base not in self.unaligned

    def new(self, like: Empty | None) -> Any:
        """Allocate memory; None for None."""
        if like is None:
            return None
        slot = self._slot(like)
        self.steps.append(New(slot, _origin()))
        return slot

    def view(
        self, of: Any, shape: Sequence[int], strides: Sequence[int], start: int = 0, dtype: torch.dtype | None = None
    ) -> Any:
        """A slot in the memory of `of` with another shape. It begins `start` elements after the first element of `of`.

        `dtype`: of the slot, whose elements are that memory's bits; strides and `start` count these elements. None: that of
        `of`. Memory of elements of another size has to be contiguous.
        """
        number, dtype = next(self._numbers), dtype or of.dtype
        start += of.start * of.dtype.itemsize // dtype.itemsize
        slot = Slot(number, tuple(shape), tuple(strides), dtype, of.base, start)
        self.steps.append(View(slot, _origin()))
        return slot

    def descriptor(self, of: Any, block: Sequence[int], describe: Callable[..., Any]) -> Any:
        """A slot for a descriptor of tiles of a matrix, which `describe(matrix, *block)` makes when the plan runs."""
        made = replace(of, number=next(self._numbers), block=tuple(block))
        self.steps.append(Torch(describe, (of, *block), (made,), (), _origin()))
        return made

    def torch(
        self,
        function: Any,
        *arguments: Any,
        makes: Empty | Sequence[Empty | None] | None = None,
        writes: Iterable[Slot | None] = (),
    ) -> Any:
        """Call function(*arguments).

        Args:
            function: returns one tensor, several, or nothing.
            arguments: slots, lists and records of slots, and constants.
            makes: what it returns; a sequence where that is several tensors, with None for those that are None.
            writes: those arguments that it writes to, and may read; None for none.

        Returns:
            A slot, or a tuple of slots, for what it makes.
        """
        written = tuple(filter(None, writes))
        self._check_order(
            [each for each in arguments if each is None or type(each) is not Slot or each not in written], written
        )
        wanted: Sequence[Empty | None] = [makes] if isinstance(makes, Empty) else makes or []
        made = tuple([None if each is None else self._slot(each) for each in wanted])
        self.steps.append(Torch(function, arguments, made, written, _origin()))
        return made[0] if isinstance(makes, Empty) else made

    def contiguous(self, slot: Any) -> Any:
        """The slot, or a contiguous copy of it; None for None."""
        if slot is None or slot.is_contiguous():
            return slot
        return self.torch(torch.Tensor.contiguous, slot, makes=Empty(slot.shape, slot.dtype))

    def fields(self, record: Any, *names: str) -> dict[str, Any]:
        """Fields of a record, contiguous, by the kernel's parameter that reads them: `p_` and the name."""
        return {f"p_{name}": self.contiguous(getattr(record, name)) for name in names}

    def decide(self, decision: str, tiling: Any) -> Any:
        """The tiling of a decision: `tiling`, or the caller's in `tiles`, or what takes its place if that was refused.

        Where a compiler refuses a launch of this decision, the steps from here on are planned again.

        Args:
            decision: its name; `launch` takes it too.
            tiling: what the tables chose.
        """
        tiling = self.tiles.get(decision, tiling)
        while self.replaced and (decision, tiling) in self.replaced:
            tiling = self.replaced[decision, tiling]
        self.decisions[decision] = tiling, len(self.steps)
        return tiling

    def launch(
        self,
        kernel: Any,
        decision: str,
        grid: int,
        *,
        reads: Mapping[str, Given],
        writes: Mapping[str, Given],
        sizes: Mapping[str, Number],
        flags: Mapping[str, Any] | None = None,
    ) -> None:
        """Launch a kernel with the tiling of a decision.

        Args:
            kernel: a `@triton.jit` function.
            decision: the name that `decide` was given.
            grid: number of programs.
            reads, writes: slots, or tuples of them, by the name of the kernel's parameter.
            sizes: numbers by the name of the kernel's parameter.
            flags: the kernel's constants that do not follow from the tiling.

        Raises:
            TypeError: the kernel has a parameter that is not given, or is given one that it does not have. Of the tiling's
                constants it is given those that it has.
        """
        (tiling, first_step), flags = self.decisions[decision], flags or {}
        module, name, parameters, constants = signature_of(kernel)
        chosen = Decision.of(decision, tiling, flags, first_step, constants)
        tensors = {**reads, **writes}
        given, wanted = {*tensors, *sizes, *flags, *chosen.constants}, {*parameters, *constants}
        if given != wanted:
            raise TypeError(f"{module}.{name}: missing {sorted(wanted - given)}, unknown {sorted(given - wanted)}.")
        self._check_order(reads.values(), writes.values())
        slots = tuple([tensors[each] for each in parameters if each in tensors])
        numbers = tuple([sizes[each] for each in parameters if each in sizes])
        kernels, module_in_package = kernels_of(module)
        self.steps.append(Launch(kernels, module_in_package, name, chosen, grid, reads, writes, slots, numbers, _origin()))

    def launch_over(self, kernel: Any, tiling: Any, count: int, *, decision: str = "", **given: Any) -> None:
        """Decide a tiling, and launch a kernel with it over `count` rows or numbers: as many programs as its `grid` says.

        `decision`: its name; empty: the kernel's. `given`: `reads`, `writes`, `sizes` and `flags`, as for `launch`.
        """
        decision = decision or kernel.__name__
        self.launch(kernel, decision, self.decide(decision, tiling).grid(count), **given)

    def last_uses(self, *, by_address: bool = False) -> list[list[int]]:
        """For each step the numbers of the slots that no later step uses: their tensors can be freed after the step.

        `by_address`: a launch takes addresses, and computes that of a view from the view's base.
        """
        alive = {number for slot in slots_in((self.results, self.arguments)) for number in (slot.number, slot.base)}
        found: list[list[int]] = []
        for step in reversed(self.steps):
            if type(step) is Launch:
                used = {
                    number
                    for slot in slots_in((step.slots, step.numbers))
                    for number in (slot.base, slot.base if by_address and not slot.block else slot.number)
                }
            elif type(step) is Torch:
                used = {number for slot in slots_in((step.arguments, step.made)) for number in (slot.number, slot.base)}
            elif step.slot.number in alive:
                used = {step.slot.base} if type(step) is View else set()
            else:  # memory or a view that no later step uses
                used = {step.slot.number}
            found.append(sorted(used - alive))
            alive |= used
        return found[::-1]

    @property
    def launches(self) -> list[Launch]:
        return [step for step in self.steps if isinstance(step, Launch)]

    def _slot(self, like: Empty) -> Slot:
        number = next(self._numbers)
        return Slot(number, tuple(like.shape), like.strides, like.dtype, number)

    def _check_order(self, reads: Iterable[Any], writes: Iterable[Any]) -> None:
        """Asserts that no step reads an argument of the call after a step has written to it."""
        if self._overwritten:
            late = [slot for slot in slots_in(reads) if slot.base in self._overwritten]
            assert not late, f"a step reads an argument after it was written to: {late}"
        for slot in slots_in(writes):
            if slot.base < len(self.arguments):
                self._overwritten.add(slot.base)


def slots_in(values: Iterable[Any]) -> list[Slot]:
    """The slots among values, in lists and tuples too."""
    return [each for each in flat(values) if type(each) is Slot]


def _origin() -> Origin:
    """The line that called a method of `Plan`, outside this module and outside modules with a global `PLANS_FOR_CALLERS`."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename == __file__ or "PLANS_FOR_CALLERS" in frame.f_globals:  # `contiguous` calls `torch`
        assert frame.f_back is not None
        frame = frame.f_back
    code = frame.f_code
    return Origin(frame.f_globals["__name__"], code.co_filename, code.co_name, frame.f_lineno)


def run_plan(
    plan: Plan, tensors: Sequence[Tensor | None], replan: Callable[[Mapping[Any, Any]], Plan]
) -> tuple[tuple[Any, ...], Plan]:
    """Runs a plan step by step. Returns the results, and the plan that ran: another one if a compiler refused a tiling.

    In a dry run the plan is listed, and results have any values.

    Args:
        plan: the plan of the call.
        tensors: the call's, those of lists one by one; None for None.
        replan: plans the call again, with these `Plan.replaced`.
    """
    memory: dict[int, Any] = {slot.number: tensor for slot, tensor in zip(plan.arguments, tensors, strict=True) if slot}
    given: Any
    device = next(iter(memory.values())).device
    if dry_runs:
        launching.list_plan(plan, replan)
        return tuple([_without_data(each, memory, device) for each in plan.results]), plan
    ends, i = plan.last_uses(), 0
    while i < len(plan.steps):
        step = plan.steps[i]
        if type(step) is Launch:
            try:
                given = [_filled(each, memory) for each in step.slots]
                numbers = tuple([_number(each, memory) for each in step.numbers])
                step.kernels.launch(step.module, step.kernel, step.decision, step.grid, given, numbers)
            except Exception as error:
                plan, i = _with_smaller_tiling(plan, step, i, error, replan)
                ends = plan.last_uses()
                continue
        elif isinstance(step, (New, View)) and step.slot.number in ends[i]:
            ends[i].remove(step.slot.number)  # no step uses it, and the memory of a view may be gone
        elif type(step) is New:
            slot = step.slot
            memory[slot.number] = empty_strided(slot.shape, slot.strides, slot.dtype, device)
        elif type(step) is View:
            slot, base = step.slot, memory[step.slot.base]
            base = base if base.dtype == slot.dtype else _with_dtype(base, slot.dtype)
            memory[slot.number] = base.as_strided(slot.shape, slot.strides, base.storage_offset() + slot.start)
        elif type(step) is Torch:
            given = [_filled(each, memory) for each in step.arguments]
            made = step.function(*given)
            for made_slot, tensor in zip(step.made, made if len(step.made) > 1 else (made,), strict=False):
                if made_slot is not None:
                    memory[made_slot.number] = tensor
        given = made = tensor = base = None  # `memory` alone holds tensors
        for number in ends[i]:
            del memory[number]
        i += 1
    launching.list_plan(plan, replan)
    return tuple([_filled(each, memory) for each in plan.results]), plan


def _with_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The bits of a tensor as elements of another dtype; in one dimension, where elements have another size."""
    return (tensor if tensor.dtype.itemsize == dtype.itemsize else tensor.view(-1)).view(dtype)


def _without_data(value: Any, memory: Mapping[int, Any], device: torch.device) -> Any:
    """Tensors in place of slots: new ones, but for the call's own."""
    if isinstance(value, Slot):
        own = memory.get(value.number)
        return empty_strided(value.shape, value.strides, value.dtype, device) if own is None else own
    return None if value is None else [_without_data(each, memory, device) for each in value]


def _number(value: Number, memory: Mapping[int, Any]) -> Any:
    """A launch's number, with elements in place of a distance."""
    if type(value) is not Distance:
        return value
    first, to = (memory[slot.number].data_ptr() for slot in value)
    return (to - first) // value.itemsize


def _filled(value: Any, memory: Mapping[int, Any]) -> Any:
    """A value with tensors in place of slots, also in lists and records. A CPU, which emulates, gets `Neighbours`."""
    kind = type(value)
    if kind is Slot:
        return memory[value.number]
    if kind is Reached:
        tensors = [memory[slot.number] for slot in value]
        return Neighbours(tensors) if tensors[0].device.type == "cpu" else tensors[0]
    if kind is list or kind is tuple:
        return kind([_filled(each, memory) for each in value])
    if hasattr(kind, "_fields") and slots_in(value):
        return kind(*[_filled(each, memory) for each in value])
    return value


def _with_smaller_tiling(
    plan: Plan, step: Launch, i: int, error: Exception, replan: Callable[[Mapping[Any, Any]], Plan]
) -> tuple[Plan, int]:
    """The plan with the next smaller tiling for a refused launch, and the number of the step to go on with.

    That is the first step that depends on the decision: what earlier steps made stays.

    Raises:
        UnifiedBufferError, GPUResourcesError: there is no smaller tiling. Any error that is no refusal is raised again.
    """
    refused, decision, tiling = launching.refusal(error), step.decision, step.decision.tiling
    if refused is None:
        raise error
    following = tiling.smaller()
    if following is None:
        raise refused.without_smaller(decision.name, tiling) from error
    warnings.warn(f"{decision.name}: {tiling} {refused.reason}; using {following} instead.", RuntimeWarning, stacklevel=2)
    launching.replaced[decision.name, tiling] = following
    after, first = replan(launching.replaced), decision.first_step
    done = plan.steps[first:i]
    origins = [[step.origin for step in each.steps[:first]] for each in (plan, after)]
    assert origins[0] == origins[1], "steps before a decision do not depend on it"
    assert not any(_writes_argument(plan, each) for each in done), "a step that would run again wrote to an argument"
    return after, first


def _writes_argument(plan: Plan, step: Step) -> bool:
    """Whether a step writes to the memory of one of the call's tensors."""
    written = step.writes.values() if type(step) is Launch else step.writes if type(step) is Torch else ()
    return any(slot.base < len(plan.arguments) for slot in slots_in(written))


def empty_strided(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocates the memory of a step `New`."""
    return torch.empty_strided(sizes, strides, dtype=dtype, device=device)
