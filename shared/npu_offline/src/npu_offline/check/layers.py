"""The layers of a program that our operators compute, each compared with what its own class computes in fp64.

What goes into each layer while the program runs, what comes out, and the gradients of both are kept. Later a twin of the
model, in fp64 and with the classes from before the patch, is called with the same. In it every layer gets what it got in the
program, and passes on what it gave there: its error is its own.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from npu_tiling.chips import plain_pytorch
from npu_tiling.models import Derived
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from ..launches import Emulation
from .stopped import said_of

OPERATORS = ("npu_rms_norm", "npu_embedding", "npu_fused_linear_cross_entropy", "npu_attn_res")
"""The packages of our operators, each with its `patch`."""
_OTHERS = ("liger_kernel", "torch_npu")
_MOST = 4  # calls of models that are compared
_ROUNDINGS = 4  # of a value on its way through a layer or back
_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_WIDENING = ("float", "half", "bfloat16")  # methods of tensors
_CALL = nn.Module.__call__


@dataclass(eq=False)
class _Call:
    """A call of a layer, or of the whole model.

    Attributes:
        module, name: the layer, and its name in the model.
        ins, outs: tensors by their place among arguments and results.
        of_ins, of_outs: their gradients.
        launched: kernels by number of the launch, without those of calls inside.
        wrong: what differs from fp64 by more than rounding does, and by how much.
        share: the largest error, as a share of what rounding may do.
        failed: why it was not compared.
    """

    module: nn.Module
    name: str
    ins: dict[str, Tensor] = field(default_factory=dict)
    outs: dict[str, Tensor] = field(default_factory=dict)
    of_ins: dict[str, Tensor] = field(default_factory=dict)
    of_outs: dict[str, Tensor] = field(default_factory=dict)
    launched: dict[int, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    share: float = 0.0
    failed: str = ""

    def compare(self, what: str, found: Tensor, expected: Tensor, unit: float) -> None:
        """Note how far a result is from the one in fp64, by norms."""
        error = (found.double() - expected).norm().item() / max(expected.norm().item(), torch.finfo(torch.float32).tiny)
        error = math.inf if math.isnan(error) else error
        self.share = max(self.share, error / unit)
        if error > unit:
            self.wrong[what] = f"off by {error:.2g} of its norm, {unit:.2g} is allowed"


@dataclass(eq=False)
class _Run:
    """A call of a model.

    Attributes:
        module, twin: the model, and a copy from before the call.
        arguments: positional ones and those by name.
        random: the state of random numbers before it.
        dtype: of products: autocast's, or fp32.
        calls: of layers, as they began; the first is the model's own.
    """

    module: nn.Module
    twin: nn.Module
    arguments: tuple[Any, Any]
    random: Tensor
    dtype: torch.dtype
    calls: list[_Call] = field(default_factory=list)


class Layers:
    """The calls of layers in a program.

    Attributes:
        others: kernels of other libraries that a model's pages of code name.
        skipped: calls of models that are not compared.
    """

    def __init__(self, emulation: Emulation) -> None:
        self._emulation = emulation
        self._runs: list[_Run] = []
        self._open: list[_Call] = []
        self._gradients: dict[int, dict[str, list[Tensor]]] = {}  # of the parameters of each model, one for each backward
        self.others: dict[str, None] = {}
        self.skipped = 0

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Until the block ends, calls are kept."""

        def called(module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
            if _is_ours(type(module)) if self._open else self._begin(module, arguments, keywords):
                return self._call(module, arguments, keywords)
            return _CALL(module, *arguments, **keywords)

        with mock.patch.object(nn.Module, "__call__", called):
            yield

    def _begin(self, module: nn.Module, arguments: Any, keywords: Any) -> bool:
        """Keep the model that is about to be called; False if it is not compared."""
        self.others |= dict.fromkeys(_others_of(module))
        again = torch._C._current_graph_task_id() != -1  # in a backward, which computes a part again
        if again or not any(_is_ours(type(each)) for each in module.modules()):
            return False
        if len(self._runs) == _MOST:
            self.skipped += 1
            return False
        with torch._C.DisableTorchFunction():
            given = _pytree.tree_map_only(Tensor, lambda each: each.detach().clone(), (arguments, keywords))
            dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
            self._runs.append(_Run(module, copy.deepcopy(module), given, torch.get_rng_state(), dtype))
        if id(module) not in self._gradients:
            kept = self._gradients[id(module)] = defaultdict(list)
            for name, parameter in module.named_parameters():
                if parameter.requires_grad:
                    parameter.register_hook(lambda each, kept=kept[name]: kept.append(each.detach().clone()))
        return True

    def _call(self, module: nn.Module, arguments: Any, keywords: Any) -> Any:
        run, first = self._runs[-1], len(self._emulation.launches)
        call = _Call(module, next((name for name, each in run.module.named_modules() if each is module), ""))
        run.calls.append(call)

        def taken(key: str, tensor: Tensor) -> Tensor:
            call.ins[key] = tensor.detach().clone()
            return _noted(tensor.view_as(tensor), key, call.of_ins)  # the gradient of a view is of this layer alone

        def given(key: str, tensor: Tensor) -> Tensor:
            call.outs[key] = tensor.detach().clone()
            return _noted(tensor, key, call.of_outs)

        arguments, keywords = _mapped(taken, (arguments, keywords))
        self._open.append(call)
        try:
            results = _CALL(module, *arguments, **keywords)
        finally:
            self._open.pop()
        _mapped(given, results)
        inside = {number for each in run.calls for number in each.launched}
        launches = enumerate(self._emulation.launches[first:], first)
        call.launched = {number: launch.kernel for number, launch in launches if number not in inside}
        return results

    def rows(self) -> list[dict[str, Any]]:
        """For each layer: its class, its calls, the kernels of its forward, and whether all that it computed is right."""
        found: dict[tuple[str, str], list[_Call]] = {}
        for run in self._runs:
            backward = [each for each in self._runs if each.module is run.module and each.calls[0].of_outs]
            kept = self._gradients[id(run.module)].items() if run in backward else ()
            alone = {name: all_ for name, all_ in kept if len(all_) == len(backward) + self.skipped}
            failed = ""
            try:
                _Replay(run).compare({name: all_[backward.index(run)] for name, all_ in alone.items()})
            except Exception as error:  # of the model's own code, in fp64
                failed = f"it was not compared: in fp64 its model raises {said_of(error).splitlines()[0]}"
            for call in run.calls:
                call.failed = failed
                if _is_ours(type(call.module)):
                    name = call.name or type(run.module).__name__
                    found.setdefault((name, type(call.module).__name__), []).append(call)
        rows = []
        for (name, kind), calls in found.items():
            kernels = list(dict.fromkeys(kernel for call in calls for kernel in call.launched.values()))
            first = {what: text for call in reversed(calls) for what, text in call.wrong.items()}
            why = [f"{what}: {text}" for what, text in first.items()]
            reasons = list(dict.fromkeys(call.failed for call in calls if call.failed))
            if not kernels:
                reasons.append("it launched no kernel: it was stopped, or computed what it did before the patch")
            verdict = "wrong" if why else "not run" if reasons else "right"
            why += reasons
            share = max(call.share for call in calls)
            row = {"layer": name, "class": kind, "calls": len(calls), "kernels": kernels, "share": share}
            rows.append({**row, "verdict": verdict, "why": why})
        return rows


class _Replay:
    """The call of a model again, in fp64."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._left = list(run.calls)
        self._names = {id(each): name for name, each in run.twin.named_modules()}
        self._arrived: list[tuple[_Call, str, Tensor]] = []  # gradients of layers' results, in order

    def compare(self, gradients: Mapping[str, Tensor]) -> None:
        """Compare all layers.

        Args:
            gradients: of the model's parameters, by name.
        """
        run, twin, model = self._run, self._run.twin, self._run.calls[0]
        for module in twin.modules():
            module.__class__ = _original(type(module))
            if hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = False  # type: ignore[assignment]
            if isinstance(module, nn.RMSNorm) and module.eps is None:
                module.eps = torch.finfo(torch.float32).eps  # as in the program, and not that of fp64
        twin.double()
        arguments, keywords = _mapped(lambda _, each: each.double(), run.arguments)

        def called(module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
            return self._called(module, arguments, keywords)

        with (
            _fp64_is_default(),
            torch.random.fork_rng(devices=[], device_type="cpu"),
            mock.patch.object(nn.Module, "__call__", called),
            plain_pytorch(),
            _Fp64(),
        ):
            torch.set_rng_state(run.random)
            results: dict[str, Tensor] = {}
            _mapped(lambda key, each: results.setdefault(key, each), twin(*arguments, **keywords))
            ends = [key for key in model.of_outs if key in results]
            if ends:
                torch.autograd.backward([results[key] for key in ends], [model.of_outs[key].double() for key in ends])
        self._compare_parameters(gradients)
        if self._arrived and issubclass(type(run.module), Derived):  # what the loss gives to the last layer is the head's
            call, key, expected = self._arrived[0]
            if key in call.of_outs and call is not model:
                model.compare(f"the gradient of the result of {call.name}", call.of_outs[key], expected, self._unit(model))

    def _called(self, module: nn.Module, arguments: Any, keywords: Any) -> Any:
        name = self._names.get(id(module))
        call = next((each for each in self._left if each.name == name), None)
        if call is None:
            return _CALL(module, *arguments, **keywords)
        self._left.remove(call)
        unit = self._unit(call)

        def taken(key: str, tensor: Tensor) -> Tensor:
            def arrived(expected: Tensor) -> None:
                if key in call.of_ins:
                    call.compare(f"the gradient of its argument {key[3:]}", call.of_ins[key], expected, unit)

            return _forced(tensor, call.ins.get(key), call.of_ins.get(key), arrived)

        def given(key: str, tensor: Tensor) -> Tensor:
            if key in call.outs:
                call.compare(f"its result {key}".rstrip(), call.outs[key], tensor.detach(), unit)
            arrived = functools.partial(self._note, call, key)
            return _forced(tensor, call.outs.get(key), call.of_outs.get(key), arrived)

        arguments, keywords = _mapped(taken, (arguments, keywords))
        return _mapped(given, _CALL(module, *arguments, **keywords))

    def _note(self, call: _Call, key: str, gradient: Tensor) -> None:
        self._arrived.append((call, key, gradient))

    def _unit(self, call: _Call) -> float:
        """What may be off: some four roundings, and a sum of as many terms as there may be, with errors of random signs."""
        parameters, is_model = list(call.module.parameters()), call is self._run.calls[0]
        calls = self._run.calls if is_model else [call]
        values = [each for one in calls for each in (*one.ins.values(), *one.outs.values()) if each.dim()]
        lengths = [max(each.shape[-1], each[..., 0].numel()) for each in values]
        lengths += [max(each.shape) for each in parameters if is_model]
        dtypes = [self._run.dtype if is_model else torch.float32, *(each.dtype for each in (*parameters, *values))]
        eps = max(torch.finfo(each).eps for each in dtypes if each.is_floating_point)
        return _ROUNDINGS * eps / 2 + math.sqrt(max(lengths, default=1)) * torch.finfo(torch.float32).eps / 2

    def _compare_parameters(self, gradients: Mapping[str, Tensor]) -> None:
        """Of layers' own parameters, and of those of the head, which the model's call computes."""
        model, *layers = self._run.calls
        head = getattr(model.module, "get_output_embeddings", lambda: None)()
        of = {id(each): model for each in head.parameters()} if isinstance(head, nn.Module) else {}
        of |= {id(each): call for call in layers for each in call.module.parameters(recurse=False)}
        for name, parameter in model.module.named_parameters():
            expected = self._run.twin.get_parameter(name).grad
            if id(parameter) in of and expected is not None and name in gradients:
                call = of[id(parameter)]
                call.compare(f"the gradient of {name}", gradients[name], expected, self._unit(model))


def _noted(tensor: Tensor, key: str, kept: dict[str, Tensor]) -> Tensor:
    """A tensor whose gradient is kept."""
    if tensor.requires_grad:
        tensor.register_hook(lambda gradient: kept.update({key: gradient.detach().clone()}))
    return tensor


def _forced(own: Tensor, value: Tensor | None, gradient: Tensor | None, arrived: Callable[[Tensor], None]) -> Tensor:
    """A value in place of one that was computed; its gradient likewise, after `arrived` was told the one that came."""
    if value is None:
        return own
    forced: Tensor = _Forced.apply(own, value.double(), gradient, arrived)
    return forced


class _Forced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, value: Tensor, gradient: Tensor | None, arrived: Callable[[Tensor], None]) -> Tensor:
        ctx.gradient, ctx.arrived = gradient, arrived
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> Any:
        ctx.arrived(incoming[0].detach())
        return incoming[0] if ctx.gradient is None else ctx.gradient.double(), None, None, None


@contextlib.contextmanager
def _fp64_is_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _Fp64(TorchFunctionMode):
    """What is asked for in a narrower dtype is made in fp64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _WIDENING and args:
            return args[0].double()
        args, kwargs = tuple(map(_wide, args)), {key: _wide(value) for key, value in (kwargs or {}).items()}
        try:
            return func(*args, **kwargs)
        except RuntimeError:  # products of experts have no fp64; they are in no layer of ours
            args, kwargs = _as(torch.float32, torch.float64, (args, kwargs))
            return _as(torch.float64, torch.float32, func(*args, **kwargs))


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value


def _as(dtype: torch.dtype, before: torch.dtype, value: Any) -> Any:
    return _pytree.tree_map_only(Tensor, lambda each: each.to(dtype) if each.dtype == before else each, value)


def _mapped(function: Callable[[str, Tensor], Tensor], value: Any) -> Any:
    """A value with what a function makes of each of its tensors of floating-point numbers, given the place."""

    def mapped(path: Any, leaf: Any) -> Any:
        is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return function(_pytree.keystr(path), leaf) if is_float else leaf

    return _pytree.tree_map_with_path(mapped, value)


def _is_ours(kind: type) -> bool:
    return any(each is Derived or _package(each) in OPERATORS for each in kind.__mro__)


def _original(kind: type) -> type:
    """The class that a layer had before it was patched; its own, where it stands for no other."""
    before = next(each for each in kind.__mro__ if not _is_ours(each))
    return kind if before is nn.Module else before


def _others_of(model: nn.Module) -> Iterator[str]:
    """Kernels of Liger's and operators of torch_npu that a model's pages of code name."""
    for kind in dict.fromkeys(map(type, model.modules())):
        page = sys.modules.get(kind.__module__)
        if _package(kind) in (*_OTHERS, "torch") or page is None:
            values = [kind]
        else:
            values = list(vars(page).values())
            with contextlib.suppress(OSError, TypeError):  # a page without source
                yield from (f"torch_npu: {name}" for name in re.findall(r"\btorch_npu\.(npu_\w+)", inspect.getsource(page)))
        yield from (f"{_package(each)}: {each.__name__}" for each in values if _package(each) in _OTHERS)


def _package(value: Any) -> str:
    """The package that a function or a class is from."""
    return str(getattr(value, "__module__", "")).partition(".")[0] if callable(value) else ""
