"""An operator of PyTorch made of a record and a plan: it is registered, and an equal call runs the plan of the first."""

from __future__ import annotations

import contextlib
import functools
import pkgutil
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import launch as launching
from .calls import IS_ALIGNED, IS_PLAIN, UNALIGNED, Signature, are_aligned, device_of, flat
from .chips import Device, device_for, is_overridden
from .direct import ALIGNMENT
from .dispatch import OperatorLibrary, allocator, count_dispatch_modes, is_unobserved, needs_gradient
from .launch import current_device
from .plans import Distance, Given, Launch, Neighbours, New, Plan, Reached, Slot, Torch, View, run_plan, slots_in

_MOST_KEYS = 1024
_MOST_STEPS = 128  # of a plan that becomes a function: to write it costs more than steps of so long a plan


class Operator:
    """An operator whose calls run plans. Without a chip `reference` computes the results, or a plan of PyTorch's functions.

    The first call with a key writes a plan, which runs step by step. Once all of its kernels can be called without Triton's
    JIT, the plan becomes a Python function, which later calls with that key run. They run the steps again under `use_device`
    and under a dispatch mode of PyTorch, while launches are listed, and whenever the function returns None.

    Its entries. All but `plan` end in `_run`, which calls the function, or in `_by_steps`:

        if_checked         a public function calls it first: it runs a call whose equal was checked before
        __call__           a public function calls it with arguments that it has checked
        run                PyTorch's dispatcher calls it
        below_autograd     a backward calls it where autograd is not to record the call
        plan               `explain` and tests call it: nothing runs

    Attributes:
        signature: schema, fake function and key, derived from the record.
    """

    def __init__(
        self,
        library: OperatorLibrary,
        name: str,
        record: Any,
        results: Sequence[str],
        *,
        plan: str | Callable[[Plan, Any], Sequence[Any]],
        reference: Callable[[Any], Sequence[Any]] | None = None,
        lists: Sequence[str] = (),
        writes: Sequence[str] = (),
        fixed: Mapping[str, Any] | None = None,
        is_gradient: bool = False,
        forward_mode: bool = False,
        batched: bool | Callable[..., Any] = False,
        flops: Callable[[Any], int] | None = None,
    ) -> None:
        """Registers it.

        Args:
            library: the package's operators.
            name: the operator's name.
            record: the type of its records; see calls.py.
            results: names of its results, which are keys of the record's `results`.
            plan: takes a plan and a record of slots, adds the steps of the call, and returns the slots of the results: a
                sequence, also of one or none. Or its name, "npu_rms_norm.plans:forward": the module is then imported with
                the first plan, for modules of plans import kernels, and kernels import Triton.
            reference: takes a record of tensors and returns the results in a sequence, where there are no kernels; None:
                `plan` writes that too, for no chip.
            lists: those of its results that are lists, some of whose tensors may be None.
            writes: names of the tensors that it writes to.
            fixed: fields of the record that are no arguments of the operator, with their values.
            is_gradient: whether it computes a gradient: to differentiate that again is an error.
            forward_mode: whether PyTorch can differentiate what `reference` does.
            batched: whether `reference` computes for the tensors of torch.func.vmap, or what does in its place; else PyTorch
                calls the operator for each of them, which it can where no tensors stand in lists.
            flops: as for `OperatorLibrary.define`, of a record; None: the record's method of that name, if it has one.
        """
        flops = flops or getattr(record, "flops", None)
        self.signature = Signature(name, record, results, lists=lists, writes=writes, fixed=fixed)
        self._library, self._write, self._reference = library, plan, reference
        self._key, self._returned = self.signature.key, self.signature.returned
        self._n_tensors = len(self.signature.tensors)
        self._with_gradient: Callable[..., Any] = _call
        self._as_given = False
        self._plans: dict[Hashable, Plan] = {}  # by key and chip
        self._functions: dict[Hashable, Callable[..., Any]] = {}  # by key
        self._approved: set[Hashable] = set()  # pairs of a check and the key of a call that passed it
        library.define(
            self.signature.schema,
            self.run,
            self.signature.fake,
            forward_mode=forward_mode,
            batched=self.run if batched is True else batched or None,
            flops=None if flops is None else lambda *arguments: flops(self.signature.call(arguments)),
        )
        if is_gradient:
            library.gradient(name)
            self._with_gradient = functools.partial(library.not_differentiable, name)

    def autograd(self, with_gradient: Callable[..., Any], *, as_given: bool = False) -> None:
        """Set what runs where a tensor needs a gradient: mostly `apply` of a `Function`.

        Args:
            with_gradient: takes `run`, the operator without its gradient, and the operator's arguments; returns the results.
            as_given: it calls `run` with exactly these arguments: their key, which the operator has, is not made again.
        """

        def if_needed(run: Callable[..., Any], *arguments: Any) -> Any:
            return with_gradient(run, *arguments) if needs_gradient(arguments[: self._n_tensors]) else run(*arguments)

        self._with_gradient, self._as_given = with_gradient, as_given
        self._library.autograd(self.signature.name, if_needed)

    def if_checked(self, check: Hashable, call: Any) -> Any:
        """The results, if an equal call has passed `check`; None: the caller has to check the arguments and call.

        The operator has results.
        """
        if not is_unobserved() or launching.active is not None or is_overridden():
            return None
        arguments = self.signature.arguments(call)
        try:
            key = self._key(*arguments)
            if (check, key) not in self._approved:
                return None
        except (AttributeError, RuntimeError, TypeError, ValueError):  # a wrong type or layout: the check will say so
            return None
        if torch.is_grad_enabled() and needs_gradient(arguments[: self._n_tensors]):
            return self._with_gradient(self._without_gradient(key), *arguments)
        run = self._functions.get(key)
        results = None if run is None else run(*arguments)
        return self._by_steps(key, arguments, may_compile=True) if results is None else results

    def __call__(self, call: Any, check: Hashable = None) -> Any:
        """The results of a call. `check`: what the call has passed; `if_checked` then runs equal calls."""
        arguments = self.signature.arguments(call)
        if not is_unobserved():
            return self._library(self.signature.name, *arguments)
        key = self._key(*arguments)
        is_plain = key is not None and key[IS_PLAIN]
        if not is_plain:
            results = self._library(self.signature.name, *arguments)
        elif torch.is_grad_enabled() and needs_gradient(arguments[: self._n_tensors]):
            results = self._with_gradient(self._without_gradient(key), *arguments)
        elif launching.active is not None or is_overridden():
            results = self._by_steps(key, arguments, may_compile=False)
        else:
            results = self._run(key, arguments)
        if is_plain and check is not None and launching.active is None and not is_overridden():
            if len(self._approved) >= _MOST_KEYS:
                self._approved.clear()
            self._approved.add((check, key))
        return results

    def run(self, *arguments: Any) -> Any:
        """The operator's implementation, which PyTorch's dispatcher calls below autograd, for tensors of any device."""
        if launching.active is not None or is_overridden() or count_dispatch_modes():
            return self._by_steps(None, arguments, may_compile=False)
        return self._run(self._key(*arguments) if self._functions else None, arguments)

    def below_autograd(self, call: Any) -> Any:
        """The results of a call that autograd is not to record."""
        return self._library.below_autograd(self.signature.name, *self.signature.arguments(call))

    def plan(self, call: Any, chip: Device | None, *, tiles: Mapping[str, Any] | None = None) -> Plan:
        """The plan of a call on a chip; nothing runs. Tensors may be on the meta device.

        Args:
            call: a record.
            chip: the chip to plan for; None: for plain PyTorch, where the operator has no reference.
            tiles: tilings by the name of their decision, which take the place of those that tables choose.
        """
        return self._plan(call, self._key(*self.signature.arguments(call)), chip, tiles or {}, launching.replaced)

    def _plan(self, call: Any, key: Any, chip: Device | None, tiles: Mapping[str, Any], replaced: Mapping[Any, Any]) -> Plan:
        plan = Plan(chip, tiles, replaced, device_of(call))
        slots: list[Any] = [*call]
        for i, each in enumerate(call[: self._n_tensors]):
            if isinstance(each, (list, tuple)):
                slots[i] = [plan.argument(tensor) for tensor in each]
                plan.aligned_lists = plan.aligned_lists and are_aligned(each)
            else:
                slots[i] = plan.argument(each)
                if each is not None and (key is None or (key[UNALIGNED] and each.data_ptr() % ALIGNMENT)):
                    plan.unaligned.add(slots[i].number)
        write = pkgutil.resolve_name(self._write) if isinstance(self._write, str) else self._write
        plan.results = tuple(write(plan, type(call)(*slots)))
        return plan

    def _without_gradient(self, key: Any) -> Callable[..., Any]:
        """What `with_gradient` takes as `run`, for arguments with this key."""
        if not self._as_given or launching.active is not None or is_overridden():
            return self.run
        return lambda *arguments: self._run(key, arguments)

    def _run(self, key: Any, arguments: Sequence[Any]) -> Any:
        """The results, from the function of the plan where there is one."""
        run = self._functions.get(key)
        results = None if run is None else run(*arguments)
        if results is None:
            return self._by_steps(key, arguments, may_compile=True)
        return results if self.signature.results else None

    def _by_steps(self, key: Any, arguments: Sequence[Any], *, may_compile: bool) -> Any:
        """The results, from the reference or from the plan's steps. `may_compile`: it may make a function of the plan."""
        call = self.signature.call(arguments)
        device = device_of(call)
        chip = device_for(device)
        if chip is None and self._reference is not None:
            with _without_autocast(device):
                return self._returned(self._reference(call))
        key = key or self._key(*arguments)  # no earlier: the reference needs none
        plan = self._plans.get((key, chip))
        if plan is None or plan.replaced is not launching.replaced:  # a test may begin without refused tilings
            plan = self._plan(call, key, chip, {}, launching.replaced)
        tensors = [*flat(call[: self._n_tensors])]
        replan = functools.partial(self._plan, call, key, chip, {})
        with _without_autocast(device):
            results, plan = run_plan(plan, tensors, replan)
        if key is not None:
            self._keep(key, chip, plan)
            if may_compile and key[IS_ALIGNED] and key not in self._functions and len(plan.steps) <= _MOST_STEPS:
                self._compile(key, plan, tensors, arguments)
        return self._returned(results)

    def _keep(self, key: Hashable, chip: Device | None, plan: Plan) -> None:
        if len(self._plans) >= _MOST_KEYS:
            self._plans.clear()
            self._functions.clear()
        self._plans[key, chip] = plan

    def _compile(self, key: Hashable, plan: Plan, tensors: Sequence[Tensor | None], arguments: Sequence[Any]) -> None:
        """Notes after a run that no kernel needs Triton's JIT any more; after the next run, makes a function of the plan."""
        if plan.is_direct:
            n, lists = self._n_tensors, (list, tuple)
            lengths = [len(e) if i < n and isinstance(e, lists) else None for i, e in enumerate(arguments)]
            function = compile_plan(plan, tensors, lengths)
            if function is not None:
                self._functions[key] = function
        else:
            device = device_of(tensors)
            plan.is_direct = all(_direct_call(step, device) is not None for step in plan.launches)


def _without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """PyTorch's operators in a reference and in a plan's steps compute in the dtypes of their tensors."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def _call(run: Callable[..., Any], *arguments: Any) -> Any:
    """What runs until `autograd` sets something else."""
    return run(*arguments)


# A Python function of a plan.


def compile_plan(plan: Plan, tensors: Sequence[Tensor | None], lengths: Sequence[int | None]) -> Callable[..., Any] | None:
    """Makes a Python function of an operator's arguments that runs a plan's steps without any decision.

    The function returns the results: one by itself, else a tuple. While the tensors' device is not the current one, a
    profiler watches launches, or autocast would cast what PyTorch computes, it does nothing and returns None.

    Args:
        plan: the plan.
        tensors: the call's, those of lists one by one; None for None.
        lengths: for each argument of the operator how many tensors it has if it is a list of them, else None.

    Returns:
        The function; None where a kernel of the plan needs Triton's JIT, or tensors lie on several devices.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    device = given[0].device
    calls = [_direct_call(step, device) for step in plan.launches]
    if None in calls or any(tensor.device != device for tensor in given):
        return None
    return _Writer(plan, device, lengths).function(iter(calls))


def _direct_call(step: Launch, device: torch.device) -> Any:
    """How to call the compiled kernel, and who watches launches; None where the launch needs Triton's JIT."""
    if any(slot.start * slot.dtype.itemsize % ALIGNMENT for slot in slots_in(step.slots)):
        return None
    dtypes = [_dtype(each) for each in step.slots]
    return step.kernels.direct_call(step.module, step.kernel, step.decision, step.grid, device, dtypes, step.numbers)


def _dtype(given: Given) -> Any:
    if given is None:
        return None
    if isinstance(given, tuple):
        return given[0].dtype if type(given) is Reached else tuple([slot.dtype for slot in given])
    return (given.dtype, *given.block) if given.block else given.dtype


class _Writer:
    """Writes a plan as the text of a function in Python.

    The text has names for all constants (c0, c1, ...), sizes too: plans with the same steps share a text. In it t0, t1, ...
    are tensors by the number of their slot, l0, l1, ... the operator's lists of tensors, and o0, o1, ... its options, which
    it does not read.
    """

    def __init__(self, plan: Plan, device: torch.device, lengths: Sequence[int | None]) -> None:
        self._plan, self._device, self._lengths = plan, device, lengths
        self._values: list[Any] = []
        self._starts: dict[int, str] = {}  # names of addresses that distances begin at
        self._by_address = device.type == "cuda"  # Triton's launcher takes addresses, that of triton-ascend tensors
        made = [
            each.made if isinstance(each, Torch) else () if isinstance(each, Launch) else each.slot for each in plan.steps
        ]
        self._memory = {slot.number: slot for slot in slots_in((plan.arguments, made))}

    def function(self, calls: Iterator[Any]) -> Callable[..., Any]:
        """The function. `calls` gives a DirectCall and its watchers for each launch of the plan, in order."""
        parameters, lines = self._parameters()
        watchers: dict[int, Any] = {}
        index, empty = self._name(self._device.index), self._name(allocator(self._device))
        for step, ended in zip(self._plan.steps, self._plan.last_uses(by_address=self._by_address), strict=True):
            if isinstance(step, (New, View)) and step.slot.number in ended:
                continue
            names = [f"t{number}" for number in ended]
            if isinstance(step, New):
                shape, strides, dtype = map(self._name, (step.slot.shape, step.slot.strides, step.slot.dtype))
                line = f"t{step.slot.number} = {empty}({shape}, {strides}, {dtype})"
            elif isinstance(step, View):
                line = f"t{step.slot.number} = {self._view(step.slot)}"
            elif isinstance(step, Torch):
                made = ", ".join("_" if slot is None else f"t{slot.number}" for slot in step.made)
                names += ["_"] * (None in step.made)
                given = ", ".join(map(self._spell, step.arguments))
                line = f"{made}{' = ' * bool(made)}{self._name(step.function)}({given})"
            else:
                call, watching = next(calls)
                watchers[id(watching)] = watching
                tensors = map(self._address if self._by_address else self._spell, step.slots)
                lines += self._starts_of(step)
                values = [*map(self._spell, call.handles), *tensors, *map(self._spell, (*step.numbers, *call.rest))]
                stream = f"{self._name(call.stream_of)}({index})"
                line = f"{self._name(call.run)}({self._name(step.grid)}, 1, 1, {stream}, {', '.join(values)})"
            lines.append(line + (f"; del {', '.join(names)}" if names else ""))
        current = current_device(self._device.type)
        conditions = [] if current is None else [f"{self._name(current)}() != {index}"]
        conditions += [self._name(each) for each in watchers.values()]
        if any(type(step) is Torch for step in self._plan.steps) and self._device.type != "meta":
            conditions.append(f"{self._name(torch.is_autocast_enabled)}({self._name(self._device.type)})")
        first = [f"if {' or '.join(conditions)}: return None"] if conditions else []
        results = [self._spell(each) for each in self._plan.results]
        last = f"return {results[0]}" if len(results) == 1 else f"return ({', '.join(results)})"
        body = "\n  ".join([f"def run({', '.join(parameters)}):", *first, *lines, last])
        constants = ", ".join(f"c{i}" for i in range(len(self._values)))
        run: Callable[..., Any] = _maker(f"def make({constants}):\n {body}\n return run")(*self._values)
        return run

    def _parameters(self) -> tuple[list[str], list[str]]:
        """The function's parameters, and lines that take lists apart."""
        parameters: list[str] = []
        lines: list[str] = []
        number = 0
        for i, length in enumerate(self._lengths):
            if length is None:
                parameters.append(f"t{number}" if number < len(self._plan.arguments) else f"o{i}")
                number += 1
                continue
            parameters.append(f"l{i}")
            if length:
                lines.append(f"{', '.join(f't{number + j}' for j in range(length))}, = l{i}")
            number += length
        return parameters, lines

    def _name(self, value: Any) -> str:
        """A new name for a constant."""
        self._values.append(value)
        return f"c{len(self._values) - 1}"

    def _spell(self, value: Any) -> str:
        """A slot, slots, None or a constant as the text has it."""
        kind = type(value)
        if kind is Distance:
            return f"({self._start(value.to)} - {self._starts[value.first.number]}) // {value.itemsize}"
        if kind is list or kind is tuple:
            text = "".join(f"{self._spell(each)}, " for each in value)
            return f"[{text}]" if kind is list else f"({text})"
        if hasattr(kind, "_fields") and slots_in(value):
            return f"{self._name(kind)}({', '.join(map(self._spell, value))})"
        if kind is Reached and self._device.type == "cpu":  # as `_filled` has them
            return f"{self._name(Neighbours)}(({''.join(f'{self._spell(each)}, ' for each in value)}))"
        if kind is Reached:
            value, kind = value[0], Slot
        return f"t{value.number}" if kind is Slot else "None" if value is None else self._name(value)

    def _starts_of(self, step: Launch) -> list[str]:
        """Lines that note the addresses at which a launch's distances begin."""
        firsts = [each.first for each in step.numbers if type(each) is Distance]
        new = {slot.number: slot for slot in firsts if slot.number not in self._starts}
        self._starts |= {number: f"a{number}" for number in new}
        return [f"a{number} = {self._start(slot)}" for number, slot in new.items()]

    def _start(self, slot: Slot) -> str:
        return self._address(slot) if self._by_address else f"t{slot.number}.data_ptr()"

    def _address(self, slot: Given) -> str:
        if slot is None:
            return "None"
        if isinstance(slot, tuple):
            return self._address(slot[0]) if type(slot) is Reached else f"({''.join(f'{self._address(e)}, ' for e in slot)})"
        if slot.block:
            return self._spell(slot)
        start = slot.start * slot.dtype.itemsize
        return f"t{slot.base}.data_ptr()" + (f" + {self._name(start)}" if start else "")

    def _view(self, slot: Slot) -> str:
        shape, strides, start = map(self._name, (slot.shape, slot.strides, slot.start))
        base = own = f"t{slot.base}"
        memory, is_argument = self._memory[slot.base], slot.base < len(self._plan.arguments)
        if memory.dtype != slot.dtype:
            flat = "" if memory.dtype.itemsize == slot.dtype.itemsize else ".view(-1)"  # as `_with_dtype`
            base = f"{base}{flat}.view({self._name(slot.dtype)})"
            if (memory.shape, memory.strides, 0) == (slot.shape, slot.strides, slot.start):
                return base
            if is_argument:  # which `own` keeps no longer than its caller does
                base, own = f"(own := {base})", "own"
        return f"{base}.as_strided({shape}, {strides}, {f'{own}.storage_offset() + ' * is_argument}{start})"


@functools.lru_cache(maxsize=4096)
def _maker(text: str) -> Callable[..., Any]:
    """The function `make` of a text: it takes the constants and returns the function of a plan."""
    scope: dict[str, Any] = {}
    exec(text, scope)
    make: Callable[..., Any] = scope["make"]
    return make
