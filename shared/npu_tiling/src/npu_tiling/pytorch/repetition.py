"""A call of an operator as a function in Python that was written for it, which does the call again for other tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..launching.direct import Watchers
from ..launching.launcher import current_device

_requires_grad = attrgetter("requires_grad")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor of the call is.

    Attributes:
        number: of the variable that holds it, `t3`.
        base: number of the argument or new tensor whose memory it has; `number`, if it is that tensor.
        start: bytes from the start of the base.
    """

    number: int
    base: int
    start: int


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A descriptor for TMA: the place of its tensor, and the rest of it."""

    place: Place
    rest: Any

    def of(self, tensor: Tensor) -> Any:
        """The descriptor of a tensor."""
        descriptor = object.__new__(type(self.rest))  # copy.copy takes four times as long
        vars(descriptor).update(vars(self.rest), base=tensor)
        return descriptor


class Names:
    """Writes values as expressions in Python. A place is written as its variable, a constant as `c0`, `c1` and so on."""

    def __init__(self) -> None:
        self.constants: dict[str, Any] = {}

    def of(self, constant: Any) -> str:
        """A constant's name."""
        for name, known in self.constants.items():
            if known is constant:
                return name
        name = f"c{len(self.constants)}"
        self.constants[name] = constant
        return name

    def spell(self, value: Any) -> str:
        """The expression of a value, with its places."""
        kind = type(value)
        if kind is Place:
            return f"t{value.number}"
        if kind is Descriptor:
            return f"{self.of(value.of)}(t{value.place.number})"
        if isinstance(value, (tuple, list)):
            entries = "".join(f"{self.spell(entry)}, " for entry in value)
            if kind is tuple:
                return f"({entries})"
            make = getattr(kind, "_make", kind)  # of a NamedTuple, or list
            return f"{self.of(make)}(({entries}))"
        return repr(value) if value is None or kind in (int, bool) else self.of(value)

    def spell_address(self, value: Any) -> str:
        """The same with addresses of tensors in place of tensors, but for descriptors' tensors."""
        if type(value) is Place:
            return f"t{value.base}.data_ptr()" + (f" + {value.start}" if value.start else "")
        if type(value) is tuple:
            return f"({''.join(f'{self.spell_address(entry)}, ' for entry in value)})"
        return self.spell(value)


class Step(NamedTuple):
    """A line of the function.

    Attributes:
        text: the line.
        makes: numbers of the variables that it assigns.
        has_effect: it is kept even if nothing uses what it makes.
    """

    text: str
    makes: tuple[int, ...]
    has_effect: bool

    def numbers(self) -> set[int]:
        """Of the variables in the line."""
        return numbers_in(self.text)


class Repetition:
    """A call that is done again for other tensors, of the same sizes, strides, dtypes and device.

    Attributes:
        source: the function that does it.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        names: Names,
        arguments: int,
        results: Any,
        device: torch.device,
        watchers: Iterable[Watchers],
        *,
        calls_pytorch: bool,
    ) -> None:
        """Writes the function.

        Args:
            steps: its lines, and others.
            names: of the constants in them.
            arguments: how many tensors the call takes; their numbers are the first.
            results: what it returned, with places for tensors.
            device: of all tensors.
            watchers: of the kernels that it launches.
            calls_pytorch: whether steps are more than launches and new memory.
        """
        returned = names.spell(results)
        needed = _needed(steps, returned)
        lines = [f"def repeat({', '.join(f't{number}' for number in range(arguments))}):"]
        for step, ended in zip(needed, _ended(needed, {*range(arguments), *numbers_in(returned)}), strict=True):
            lines.append(f"    {step.text}")
            if ended:
                lines.append(f"    del {', '.join(f't{number}' for number in ended)}")
        lines.append(f"    return {returned}\n")
        self.source = "\n".join(lines)
        scope = dict(names.constants)
        exec(self.source, scope)
        self._repeat = scope["repeat"]
        self._kind, self._index, self._calls_pytorch = device.type, device.index, calls_pytorch
        self._current = current_device(self._kind)
        self._watchers = tuple(watchers)

    def is_possible(self) -> bool:
        """Whether it may be done now: the device is the current one, and no profiler watches Triton's launches."""
        if self._current is not None and self._current() != self._index:
            return False
        return not any(self._watchers)

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """The call's results for these tensors."""
        if not self._calls_pytorch:
            return self._repeat(*tensors)
        is_enabled = torch.is_grad_enabled()
        is_seen = is_enabled and any(map(_requires_grad, tensors))
        if is_seen or torch.is_autocast_enabled(self._kind):
            # The recorded call's casts are steps. Gradients stay enabled where nothing requires one: PyTorch refuses to
            # change a view in place with gradients enabled that was made without.
            with torch.set_grad_enabled(is_enabled and not is_seen), torch.autocast(self._kind, enabled=False):
                return self._repeat(*tensors)
        return self._repeat(*tensors)


def _needed(steps: Sequence[Step], returned: str) -> list[Step]:
    """The steps with an effect, and those that make what these use or what is returned."""
    wanted = numbers_in(returned)
    kept = []
    for step in reversed(steps):
        if step.has_effect or not wanted.isdisjoint(step.makes):
            wanted |= step.numbers()
            kept.append(step)
    return kept[::-1]


def _ended(steps: Sequence[Step], lasting: set[int]) -> Iterator[list[int]]:
    """For each step the variables that no later step uses, but for `lasting` ones: they are deleted after it."""
    last = {number: index for index, step in enumerate(steps) for number in step.numbers()}
    for index in range(len(steps)):
        yield [number for number, end in last.items() if end == index and number not in lasting]


def numbers_in(text: str) -> set[int]:
    """The numbers of the variables in a text."""
    return {int(number) for number in re.findall(r"\bt(\d+)\b", text)}
