"""Models whose modules or functions are replaced, and put back. Imports torch; `npu_tiling` itself does not."""

from __future__ import annotations

import contextlib
import copyreg
import functools
import inspect
import re
import sys
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from .chips import plain_pytorch
from .dispatch import as_constant, dispatch_modes, function_modes, global_hooks, is_of_pytorch, is_torchscript


class Hook:
    """Attributes of modules that are replaced together, and what they were before."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    def replace(self, holder: Any, name: str, value: Any) -> None:
        """Set an attribute of a module or class, once: a second call changes nothing."""
        if any(place is holder and known == name for place, known, _ in self._originals):
            return
        self._originals.append((holder, name, getattr(holder, name)))
        setattr(holder, name, value)

    def replace_everywhere(self, package: str, name: str, original: Any, value: Any) -> None:
        """The same in every loaded module of `package` that has `original` under that name."""
        for module_name, module in list(sys.modules.items()):
            of_package = module_name == package or module_name.startswith(f"{package}.")
            if of_package and vars(module).get(name) is original:
                self.replace(module, name, value)

    def undo(self) -> None:
        """Put back what was there."""
        while self._originals:
            holder, name, value = self._originals.pop()
            setattr(holder, name, value)


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
    _swaps: list[_Swap] = field(repr=False, compare=False)
    _fallbacks: dict[Entry, None] = field(repr=False, compare=False)

    @property
    def fell_back(self) -> tuple[Entry, ...]:
        """One entry for every module that has computed what it did before the patch, in a call so far, with the reason."""
        return tuple(self._fallbacks)

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
            _watched.pop(id(module), None)
        self._swaps.clear()  # a later patch is not this one's

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __str__(self) -> str:
        lines = [f"{self.package}: {_count(self.replaced)} replaced, {len(self.left)} left"]
        titled = (
            (self.replaced, None),
            (self.left, "left:"),
            (self.fell_back, "computed without our operators, when called:"),
        )
        for entries, title in titled:
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
    fallbacks: dict[Entry, None] = {}
    for name, module, before, after in swaps:
        _give_class(module, after)
        _watched[id(module)] = _Watched(package, name, before.__name__, fallbacks)
        weakref.finalize(module, _watched.pop, id(module), None)
    return Patch(package, tuple(replaced), tuple(left), swaps, fallbacks)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Runs a block on a CPU in fp32 with gradients, whatever defaults, modes and autocast a program has set."""
    plain, dtype = torch.autocast("cpu", enabled=False), torch.get_default_dtype()
    with (
        plain_pytorch(),
        torch.device("cpu"),
        torch.random.fork_rng(devices=[], device_type="cpu"),
        torch.inference_mode(False),
        plain,
    ):
        torch.set_default_dtype(torch.float32)
        try:
            with torch.enable_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            torch.set_default_dtype(dtype)


def obstacle(module: nn.Module) -> str | None:
    """Why a module of a known class cannot be replaced, None if it can: it holds or calls what is not torch's own."""
    if hasattr(module, "_hf_hook"):
        return "accelerate moves its parameters"
    if _other_forward(module):
        return "its forward was replaced by something else"
    if replaced := replaced_forward(type(module)):
        return replaced
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
    for name in ("forward", *getattr(type(module), "_npu_state", ())):  # of the class before
        vars(module).pop(name, None)
    module.__class__ = given
    vars(module).update(_new_state(given))


def _new_state(kind: type[Any]) -> dict[str, Any]:
    """Attributes of a module of this class: there before a compiler looks, or it compiles again."""
    return {name: make() for name, make in getattr(kind, "_npu_state", {}).items()}


class _Watched(NamedTuple):
    """A patched module, for what is told of it."""

    package: str
    name: str
    was: str
    fallbacks: dict[Entry, None]


_watched: dict[int, _Watched] = {}  # by id of the module, while it lives and is patched
_elsewhere: dict[Entry, None] = {}  # fallbacks of modules that no report has, such as copies


def stands_for(module: nn.Module, known: type[Any], unless: str | None = None, /, **tensors: Any) -> bool:
    """Whether what we compute can stand for this call of a patched module; otherwise `known.forward` is to be called.

    It cannot where `known.forward` is not the one that we know, where a tensor is of a kind that our operators do not take,
    where a mode of somebody's would see other calls than the model's own, and while the model is traced or exported to
    what knows PyTorch's operators alone. Who falls back is told once, and by the report; not of an export.

    Args:
        known: the class that the module had.
        unless: a reason that was found already.
        tensors: what is read, by name; None for none. What is no tensor, as while torch.fx traces, is left to the model.
    """
    reason = unless or replaced_forward(known)
    onlooker = _onlooker()
    if onlooker == "":
        return False
    for name, tensor in tensors.items():
        kind = type(tensor)
        if kind is not Tensor and kind is not nn.Parameter and not isinstance(tensor, (Tensor, NoneType)):
            return False
        reason = reason or other_kind(name, tensor)
    reason = reason or onlooker
    if reason is None:
        return True
    _tell(id(module), type(module).__name__, reason)
    return False


@as_constant
def replaced_forward(known: type[Any]) -> str | None:
    """Why the forward of a class is not the one that it was written with, None if it is."""
    function = getattr(nn.functional, _FUNCTIONS[known]) if known in _FUNCTIONS else None
    if _written.get(known) == (known.forward, function):
        return None
    owner = next(each for each in known.__mro__ if "forward" in vars(each))
    if owner in _FUNCTIONS and known not in _FUNCTIONS:
        _FUNCTIONS[known] = _FUNCTIONS[owner]
        return replaced_forward(known)
    if is_made_by_hand(owner):  # there is no source: the first forward that is seen counts
        is_written = known not in _written or _written[known][0] is known.forward
    else:
        is_written = owner is nn.Module or _is_written_in(owner, known.forward)
    if not is_written:
        return f"the forward of the class {owner.__name__} was replaced"
    if function is not None and not inspect.isbuiltin(function) and not from_package(function, "torch"):
        return f"torch.nn.functional.{_FUNCTIONS[known]} was replaced"
    _written[known] = (known.forward, function)
    return None


_FUNCTIONS = {nn.Linear: "linear", nn.Embedding: "embedding", nn.RMSNorm: "rms_norm"}  # what a class's forward calls
_written: dict[type[Any], tuple[Any, Any]] = {}  # classes whose forward, and that function, were found to be their own


def _is_written_in(owner: type[Any], forward: Any) -> bool:
    """Whether a forward is the one in a class's source, under decorators of the package that the class is from."""
    while from_package(forward, owner.__module__.partition(".")[0]):
        if not hasattr(forward, "__wrapped__"):
            return bool(forward.__qualname__ == f"{owner.__qualname__}.forward")
        forward = forward.__wrapped__
    return False


def from_package(function: Any, *packages: str) -> bool:
    """Whether the code of a function is from one of these packages, whatever it says of itself."""
    return isinstance(function, FunctionType) and function.__globals__["__name__"].partition(".")[0] in packages


def is_made_by_hand(known: type[Any]) -> bool:
    """Whether a class's module does not have it: there is no source to compare with."""
    return getattr(sys.modules.get(known.__module__), known.__name__, None) is not known


def other_kind(name: str, tensor: Tensor | None) -> str | None:
    """Why our operators cannot take a tensor whatever its values, None if they can: a plain one, a DTensor, a fake one."""
    if tensor is None:
        return None
    kind = type(tensor)
    if kind is not Tensor and kind is not nn.Parameter and not _is_known_kind(kind):
        return f"its {name} is a {kind.__name__} and no plain tensor"
    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"its {name} is a {'nested' if tensor.is_nested else 'sparse'} tensor"
    return None


@as_constant
def _is_known_kind(kind: type[Any]) -> bool:
    if is_of_pytorch(kind):
        return True
    function = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    is_plain = function in (Tensor.__torch_function__.__func__, nn.Parameter.__torch_function__)  # type: ignore[attr-defined]
    return is_plain and kind.__torch_dispatch__ is Tensor.__torch_dispatch__


def _onlooker() -> str | None:
    """What sees the calls of a model: "" for an exporter, a reason for a mode of somebody's, and None for neither."""
    return _foreign(function_modes()) or _onlooker_below()


@as_constant
def _onlooker_below() -> str | None:
    if is_torchscript():
        return ""
    modes = dispatch_modes()
    return "" if modes and torch.onnx.is_in_onnx_export() else _foreign(modes)


def _foreign(modes: Sequence[Any]) -> str | None:
    for mode in modes:
        if _is_foreign(type(mode)):
            return f"a {type(mode).__name__} is in force, which sees what the model calls"
    return None


@as_constant
def _is_foreign(mode: type[Any]) -> bool:
    """Whether a mode is neither torch's nor our tools': it may not know what our operators do."""
    return mode.__module__.partition(".")[0] not in ("torch", "npu_tiling", "npu_offline")


def called_otherwise(layer: Any, name: str, *kinds: type[Any]) -> str | None:
    """Why a call of a layer is not the forward alone of one of these classes of torch; None if it is."""
    kind, plain = type(layer), f"a plain torch.nn.{kinds[0].__name__}"
    if kind not in kinds:
        return f"its {name} is not {plain}: it is a {kind.__module__}.{kind.__name__}"
    if other := more_than_forward(layer):
        return f"its {name} is not {plain}: {other}"
    reason: str | None = replaced_forward(kinds[0])
    return reason


def more_than_forward(layer: Any) -> str | None:
    """Why a call of a layer is not its forward alone; None if it is."""
    if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
        return "it has hooks"
    if "forward" in layer.__dict__:
        return "its forward was replaced"
    reason: str | None = _other_calls(type(layer))
    return reason


@as_constant
def _other_calls(kind: type[Any]) -> str | None:
    """Why a call of any module of a class is not torch's own; None if it is. Hooks of torch's and our tools do not count."""
    if not all(from_package(getattr(hook, "__func__", hook), "torch") for hook in global_hooks()):
        return "all modules have hooks"
    if not (from_package(kind.__call__, "torch", "npu_offline") and from_package(kind._call_impl, "torch")):
        return "how modules are called was replaced"
    return None


@as_constant
def names_of(forward: Any) -> tuple[str, ...]:
    """The names of a forward's arguments, after the module."""
    if forward not in _names:
        _names[forward] = tuple(inspect.signature(forward).parameters)[1:]
    return _names[forward]


_names: dict[Any, tuple[str, ...]] = {}


def with_signature_of(known: type[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator of the forward of a class derived from `known`: trainers and exporters read its signature."""

    def decorate(forward: Callable[..., Any]) -> Callable[..., Any]:
        functools.update_wrapper(forward, known.forward)
        forward.__signature__ = inspect.signature(known.forward)  # type: ignore[attr-defined]
        del forward.__wrapped__  # type: ignore[attr-defined]  # or accelerate, unwrapping a model, would go on to it
        return forward

    return decorate


def by_name(forward: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of `forward` by their names."""
    _check_given(arguments)
    return {**dict(zip(names_of(forward), arguments, strict=False)), **keywords}


def in_order(forward: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of a call of `forward` by their places; () where it does not take them."""
    _check_given(arguments)
    if not keywords:
        return arguments
    later = names_of(forward)[len(arguments) : len(arguments) + len(keywords)]
    if len(later) < len(keywords) or not all(name in keywords for name in later):
        return ()
    return (*arguments, *[keywords[name] for name in later])


def _check_given(arguments: Any) -> None:
    if not isinstance(arguments, tuple):  # torch.fx gives one proxy for all of them to the module that it traces
        raise TypeError("torch.fx.symbolic_trace takes no patched module: undo() first, or trace a module that calls it.")


@as_constant
def _tell(key: int, kind: str, reason: str) -> None:
    watched = _watched.get(key) or _Watched("", "", kind, _elsewhere)
    entry = Entry(watched.name, watched.was, reason)
    if entry in watched.fallbacks:
        return
    is_told = any(each[1:] == entry[1:] for each in watched.fallbacks)
    watched.fallbacks[entry] = None
    if not is_told:
        what = f"{watched.package}: {watched.name or 'the model'} ({watched.was})" if watched.package else watched.was
        warnings.warn(f"{what} computes without our operators: {reason}.", stacklevel=3)


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
        metaclass = _Made if all(issubclass(_Made, type(base)) for base in bases) else type
        _made[made_by] = metaclass(name, bases, {"__module__": make.__module__, **attributes, "_npu_made_by": made_by})
    return _made[made_by]


class _Made(type):
    """The class of classes made by `derived`: pickled as what makes them, not as a name in a module."""


def _how_made(made: Any) -> Any:
    return vars(made).get("_npu_made_by", made.__qualname__)


copyreg.pickle(_Made, _how_made)


class Derived(nn.Module):
    """A base of classes made by `derived`."""

    _npu_made_by: tuple[Callable[..., type], tuple[Hashable, ...]]

    def __new__(cls, *arguments: Any, **keywords: Any) -> Any:
        module = super().__new__(cls)
        vars(module).update(_new_state(cls))
        return module

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
