"""Giving modules of a model another class, with a report and a way back: the part of `patch` that all operators share.

A module keeps its place in the model and all that it holds (parameters, buffers, hooks, flags): only its class, and so its
forward, is another. Imports torch; `npu_tiling` itself does not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn
from torch.nn.utils.parametrize import is_parametrized


class Replacement(NamedTuple):
    """The class that a module gets.

    Attributes:
        type: its class from then on: its own one or torch's, with another forward.
        by: what computes it, for the report.
    """

    type: type[nn.Module]
    by: str


class Entry(NamedTuple):
    """A line of the report.

    Attributes:
        name: the module's qualified name; "" for the model itself.
        was: the name of its class before.
        text: what computes it instead, or why it was left alone.
    """

    name: str
    was: str
    text: str


_made: dict[Hashable, type[nn.Module]] = {}


class _Swap(NamedTuple):
    name: str
    module: nn.Module
    before: type[nn.Module]
    after: type[nn.Module]


@dataclass(frozen=True)
class Patch:
    """What was replaced in a model and what was not; printed, a table. As a context manager it is undone at the end.

    Attributes:
        package: whose operators they are.
        replaced: one entry for every module that was replaced.
        left: one entry for every module that looked like it and was left alone, with the reason.
    """

    package: str
    replaced: tuple[Entry, ...]
    left: tuple[Entry, ...]
    _swaps: tuple[_Swap, ...] = field(repr=False, compare=False)

    def undo(self) -> None:
        """Give every module the class that it had. Harmless the second time.

        Raises:
            RuntimeError: something else has been put around a module since; nothing is undone then.
        """
        swaps = [swap for swap in self._swaps if type(swap.module) is not swap.before]
        for name, module, _, after in swaps:
            if type(module) is not after or _other_forward(module):
                what = "its forward was replaced" if type(module) is after else f"it is a {type(module).__name__} by now"
                raise RuntimeError(f"{name or 'model'} cannot be restored, {what}: what was put around it must go first.")
        for _, module, before, _ in swaps:
            _give_class(module, before)

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __str__(self) -> str:
        lines = [f"{self.package}: {_count(self.replaced)} replaced, {len(self.left)} left"]
        for entries, title in ((self.replaced, None), (self.left, "left:")):
            rows = _grouped(entries)
            lines += [title] if title and rows else []
            widths = [max((len(row[column]) for row in rows), default=0) for column in range(2)]
            lines += [f"  {name:<{widths[0]}}  {was:<{widths[1]}}  {text}" for name, was, text in rows]
        return "\n".join(lines)


def swap_classes(model: nn.Module, package: str, recognise: Callable[[nn.Module], Replacement | str | None]) -> Patch:
    """Replace what is recognised in a model, where nothing stands in the way.

    Args:
        model: every module of it is looked at, itself too; one that stands in several places once.
        package: named in the report.
        recognise: what a module becomes; or why one that looks like it is left alone; or None for any other.

    Returns:
        The report.
    """
    if not isinstance(model, nn.Module):
        given = model.__name__ if isinstance(model, type) else type(model).__name__
        raise TypeError(f"model is {'the class' if isinstance(model, type) else 'a'} {given} and must be a torch.nn.Module.")
    swaps, replaced, left = [], [], []
    for name, module in model.named_modules():
        found = recognise(module)
        if isinstance(found, Replacement):
            found = obstacle(module) or found
        if found is None:
            continue
        was = type(module).__name__
        if isinstance(found, str):
            left.append(Entry(name, was, found))
        else:
            replaced.append(Entry(name, was, found.by))
            swaps.append(_Swap(name, module, type(module), found.type))
    for _, module, _, after in swaps:
        _give_class(module, after)
    return Patch(package, tuple(replaced), tuple(left), tuple(swaps))


def obstacle(module: nn.Module) -> str | None:
    """Why a module of a known class cannot be replaced, None if it can: it holds or calls what is not torch's own."""
    if hasattr(module, "_hf_hook"):
        return "accelerate moves its parameters"
    if _other_forward(module):
        return "its forward was replaced by something else"
    if is_parametrized(module):
        return "it has parametrizations: patch it before they are registered"
    for name, parameter in module.named_parameters(recurse=False):
        if type(parameter) is not nn.Parameter:
            return f"its {name} is a {type(parameter).__name__} and no plain parameter"
        if not parameter.is_floating_point():
            return f"its {name} is quantised to {str(parameter.dtype).removeprefix('torch.')}"
    return None


def _other_forward(module: nn.Module) -> bool:
    """Whether a forward was set on the module itself that is not its class's own, which accelerate leaves when it goes."""
    forward = vars(module).get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def _give_class(module: nn.Module, given: type[nn.Module]) -> None:
    vars(module).pop("forward", None)  # of the class before
    module.__class__ = given


def derived(
    name: str, bases: tuple[type, ...], attributes: Mapping[str, Any], make: Callable[..., type], *arguments: Any
) -> type[nn.Module]:
    """A class made while the program runs, the same one every time, whose instances can be copied and pickled.

    Args:
        name: of the class.
        bases: with `Derived` among them.
        attributes: of the class.
        make: a function that can be imported and, called with `arguments`, comes here with the same class.
    """
    made_by = (make, arguments)
    if made_by not in _made:
        _made[made_by] = type(name, bases, {"__module__": make.__module__, **attributes, "_npu_made_by": made_by})
    return _made[made_by]


class Derived(nn.Module):
    """A base of classes made by `derived`."""

    _npu_made_by: tuple[Callable[..., type], tuple[Hashable, ...]]

    def __reduce_ex__(self, protocol: Any) -> str | tuple[Any, ...]:
        reduced = super().__reduce_ex__(protocol)
        if "_npu_made_by" not in vars(type(self)):  # a class of somebody's own, made from a patched one
            return reduced
        assert isinstance(reduced, tuple)
        return (_instance, type(self)._npu_made_by, *reduced[2:])


def _instance(make: Callable[..., type], arguments: Sequence[Any]) -> Any:
    return object.__new__(make(*arguments))


def _count(entries: Sequence[Entry]) -> str:
    return f"{len(entries)} module{'' if len(entries) == 1 else 's'}"


def _grouped(entries: Sequence[Entry]) -> list[Entry]:
    """One line for what differs in the number of a layer alone."""
    groups: dict[Entry, int] = {}
    for entry in entries:
        alike = entry._replace(name=re.sub(r"\.\d+(?=\.|$)", ".*", entry.name))
        groups[alike] = groups.get(alike, 0) + 1
    shown = ((group.name or "(the model)", count, group) for group, count in groups.items())
    return [group._replace(name=f"{name} ({count})" if count > 1 else name) for name, count, group in shown]
