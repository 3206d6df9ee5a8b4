"""Operators registered with PyTorch whose calls cost little on the host, and what autograd records of a call.

Private names of PyTorch stand in this file alone. Imports torch; `npu_tiling` itself does not.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from .chips import dry_runs, plain_pytorch


def _private(name: str, otherwise: Any) -> Any:
    """A private name of PyTorch, by its path in torch; in a release without it, what does in its place."""
    found: Any = torch
    for part in name.split("."):
        found = getattr(found, part, None)
    return otherwise if found is None else found


# Without one of these three, calls go through the dispatcher, as if something saw them.
are_transforms_active: Callable[[], bool] = _private("_C._are_functorch_transforms_active", lambda: True)
count_dispatch_modes: Callable[[], int] = _private("_C._len_torch_dispatch_stack", lambda: 1)
_count_function_modes: Callable[[], int] = _private("_C._len_torch_function_stack", lambda: 1)
is_mapped: Callable[[Tensor], bool] = _private("_C._functorch.is_batchedtensor", lambda tensor: False)
"""Whether a tensor is one that torch.func.vmap maps over."""
_is_wrapped: Callable[[Tensor], bool] = _private("_C._functorch.is_functorch_wrapped_tensor", lambda tensor: True)
_will_run: Callable[[Any], bool] = _private("_C._will_engine_execute_node", lambda node: True)
_graph_task: Callable[[], int] = _private("_C._current_graph_task_id", lambda: -1)
keeps_graph: Callable[[], bool] = _private("_C._autograd._get_current_graph_task_keep_graph", lambda: True)
"""Whether the backward that runs now leaves the graph for another one."""
_has_kernel: Callable[[str, str], bool] = _private("_C._dispatch_has_kernel_for_dispatch_key", lambda operator, key: False)
current_cuda_device: Callable[[], int] = _private("_C._cuda_getDevice", torch.cuda.current_device)
"""What `torch.cuda.current_device` asks once CUDA is initialised, which it is where a tensor lies on it."""


class Function(torch.autograd.function._SingleLevelFunction):
    """For an operator's autograd kernel, which runs at the one level of torch.func's transforms that the dispatcher chose.

    torch.autograd.Function would start over at the outermost level.
    """

    _compiled_autograd_key = _private("autograd.Function._compiled_autograd_key", None)


# Whether a tensor stands for several upstream gradients, those of `torch.autograd.grad(..., is_grads_batched=True)`.
is_batched: Callable[[Tensor], bool] = _private("_C._functorch.is_legacy_batchedtensor", lambda tensor: True)
_is_one_of_several: Callable[[Tensor], bool] = _private("_C._functorch.is_legacy_batchedtensor", lambda tensor: False)

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)

PLAIN = frozenset((Tensor, Parameter))
"""Types of tensors without a `__torch_dispatch__` or `__torch_function__` of their own."""

_CONSTANTS = frozenset((int, float, bool, str, torch.dtype, type(None)))
_transformed = threading.local()  # .recording: inside `apply` under a transform
_ever_transformed = False


def apply(function: type[Any], *arguments: Any) -> Any:
    """`function.apply(...)` of a `Function`, under torch.func's transforms too."""
    if not are_transforms_active():
        return function.apply(*arguments)
    global _ever_transformed
    _ever_transformed = True
    before = is_in_transform()
    _transformed.recording = True
    try:
        with enable_single_level_autograd_function():
            return function.apply(*arguments)
    finally:
        _transformed.recording = before


def is_in_transform() -> bool:
    """Whether `apply` runs a Function under one of torch.func's transforms."""
    return getattr(_transformed, "recording", False)


@contextlib.contextmanager
def outer_levels() -> Iterator[None]:
    """What is called in the block, in a `Function`'s forward under a transform, is recorded by the outer levels.

    A Function's forward runs without gradients and tangents: at its own level, and not at the outer ones.
    """
    with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        yield


def unviewed(result: Tensor) -> Tensor:
    """The same memory as a tensor that is no view: autograd lets no view that a `Function` returns be changed in place."""
    return torch.ops.aten._unsafe_view(result, result.shape) if result._is_view() else result


def save_tensors(ctx: Any, *tensors: Tensor | None) -> None:
    """`ctx.save_for_backward`, which refuses tensors made in inference mode: of those, copies are saved."""
    ctx.save_for_backward(*[each.clone() if each is not None and each.is_inference() else each for each in tensors])


def forward_mode(arguments: Sequence[Any]) -> bool:
    """Whether one of these arguments has a tangent; tensors may stand in lists."""
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in _tensors(arguments))


def needs_gradient(arguments: Sequence[Any]) -> bool:
    """Whether autograd would record a call with these arguments; tensors may stand in lists."""
    if not torch.is_grad_enabled():
        return False
    for argument in arguments:
        if isinstance(argument, (list, tuple)):
            if needs_gradient(argument):
                return True
        elif isinstance(argument, Tensor) and argument.requires_grad:
            return True
    return False


def is_asked(node: Any) -> bool:
    """Whether the backward that runs now gives a gradient to this node of the graph, one of a ctx's `next_functions`.

    `backward(inputs=...)` and `torch.autograd.grad` leave nodes out.
    """
    try:
        return bool(_will_run(node))
    except RuntimeError:  # a leaf whose gradient `grad` returns, or a backward without an engine
        return True


def is_backward() -> bool:
    """Whether autograd's engine is running."""
    return _graph_task() != -1


def is_registered(operator: str, key: str) -> bool:
    """Whether PyTorch has a kernel of an operator, "aten::mm", for a dispatch key."""
    try:
        return _has_kernel(operator, key)
    except RuntimeError:  # a PyTorch without the operator
        return False


def group_named(name: str | None = None) -> Any:
    """The process group of a name: a module keeps the name, which can be copied and pickled. None: the default group."""
    groups: Any = torch.distributed.distributed_c10d
    return groups._get_default_group() if name is None else groups._resolve_process_group(name)


def allocator(device: torch.device) -> Callable[..., Tensor]:
    """empty(sizes, strides, dtype) on the current device: the fast one that Inductor's code calls, where PyTorch has it."""

    def slow(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(sizes, strides, dtype=dtype, device=device)

    found: Callable[..., Tensor] = _private(f"_C._dynamo.guards._empty_strided_{device.type}", slow)
    return found


def can_bypass_dispatcher(arguments: Sequence[Any]) -> bool:
    """Whether nothing but autograd would see an operator's call: plain tensors with data, no tracing, mode or transform.

    In a dry run it is True: for tensors without data the dispatcher would call the fake function, which launches nothing.
    """
    return bool(dry_runs) or is_unobserved() and all_plain(arguments)


def is_unobserved() -> bool:
    """Whether no tracing, mode or transform sees operators' calls."""
    if is_dynamo_compiling():  # the operator would be traced into, and not captured
        return False
    if are_transforms_active():  # levels of grad and vmap would be skipped; wrappers have no data
        return False
    if forward_ad._current_level >= 0:  # tangents would be dropped in silence
        return False
    if torch._C._get_tracing_state() is not None:  # a trace would have what a reference calls, and of a kernel nothing
        return False
    # A mode would not see the call: fake tensors, counters, selective checkpoints.
    return not count_dispatch_modes() and not _count_function_modes()


def all_plain(arguments: Sequence[Any]) -> bool:
    """Whether all tensors have data of their own: those of DTensors and other subclasses would be read as plain tensors."""
    for argument in arguments:
        kind = type(argument)
        if kind in _CONSTANTS:  # nothing to ask: most arguments, in every call
            continue
        if kind in PLAIN:
            if argument.is_meta or argument.is_neg() or is_batched(argument):  # no data, or data with the other sign
                return False
            if _ever_transformed and _is_wrapped(argument):
                return False  # after a transform what a Function saved under it is still wrapped
        elif isinstance(argument, (list, tuple)):  # asked before whether it is a tensor, which takes longer to deny
            if not all_plain(argument):
                return False
        elif isinstance(argument, Tensor):
            return False
    return True


def function_modes() -> list[Any]:
    """The modes in force that see calls of PyTorch's functions. A compiler has a stack of its own, which it traces."""
    return _get_current_function_mode_stack() if _count_function_modes() else []


def dispatch_modes() -> list[Any]:
    """The modes in force that see calls of operators."""
    return _get_current_dispatch_mode_stack() if count_dispatch_modes() else []


def is_torchscript() -> bool:
    """Whether `torch.jit.trace` records what is called."""
    return torch._C._get_tracing_state() is not None


def global_hooks() -> list[Any]:
    """The hooks of all modules."""
    kinds = ("forward", "forward_pre", "backward", "backward_pre")
    return [hook for kind in kinds for hook in getattr(torch.nn.modules.module, f"_global_{kind}_hooks").values()]


def is_of_pytorch(kind: type[Any]) -> bool:
    """Whether PyTorch computes with tensors of a class as with plain ones: DTensors and fake tensors."""
    return kind.__module__.startswith(("torch.distributed.", "torch._subclasses."))


def as_constant(function: _Function) -> _Function:
    """Let a compiler call this function while it traces, and take the result for a constant; a decorator.

    It is `torch.compiler.assume_constant_result`, which would import the compiler. All releases take classes, functions,
    numbers and strings as arguments.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def exported(kind: _Class) -> _Class:
    """Let `torch.export.save` write programs that return a named tuple of this kind; a decorator.

    Who loads such a program imports the tuple's module first. An old PyTorch that cannot save named tuples stays as it is.
    """
    register = _private("utils._pytree._register_namedtuple", None)
    if register is not None:
        register(kind, serialized_type_name=f"{kind.__module__}.{kind.__qualname__}")
    return kind


def is_autocast(tensor: Tensor) -> bool:
    """Whether autocast is enabled where a tensor is. The meta device has no autocast, and PyTorch raises an error there."""
    kind = tensor.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def holds(condition: Any) -> bool:
    """Whether a condition on sizes holds. Of sizes that depend on data, a compiled graph asks it when it runs."""
    if not torch.compiler.is_compiling():
        return bool(condition)
    from torch.fx.experimental import symbolic_shapes

    if not getattr(symbolic_shapes, "guard_or_true", bool)(condition):
        return False
    torch._check(condition)
    return True


def assert_later(condition: Tensor, message: str) -> None:
    """Let a compiled graph raise RuntimeError where a condition does not hold when it runs, on a CPU."""
    torch._assert_async(condition, message)


def is_certain(condition: Any) -> bool:
    """Whether a condition on sizes holds; False where that depends on data."""
    if not torch.compiler.is_compiling():
        return bool(condition)
    from torch.fx.experimental import symbolic_shapes

    return bool(getattr(symbolic_shapes, "guard_or_false", bool)(condition))


def is_shape(found: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether a shape is another one, in the manner of `holds`."""
    return len(found) == len(wanted) and all(holds(one == other) for one, other in zip(found, wanted, strict=True))


@as_constant
def in_forward_mode() -> bool:
    """Whether tensors may have tangents now."""
    return forward_ad._current_level >= 0


@as_constant
def is_cast_by_autocast(operator: str, kind: str) -> bool:
    """Whether autocast has a rule of its own for an operator, "aten::rms_norm", on devices of a kind, "cuda"."""
    backend = kind.upper() if kind in ("cpu", "cuda") else "PrivateUse1"
    return is_registered(operator, f"Autocast{backend}")


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)


_COUNTER = "torch.utils.flop_counter"
_waiting: list[tuple[Any, Callable[..., int]]] = []


def count_flops(operator: Any, flops: Callable[..., int]) -> None:
    """Let PyTorch's counter count flops(*arguments) for an operator."""
    _waiting.append((operator, flops))
    if _COUNTER in sys.modules:
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register() -> None:
    from torch.utils.flop_counter import register_flop_formula

    for operator, flops in _waiting:
        register_flop_formula(operator, get_raw=True)(_without_results(flops))
    _waiting.clear()


def _without_results(flops: Callable[..., int]) -> Callable[..., int]:
    def count(*arguments: Any, out_val: Any) -> int:
        return flops(*arguments)

    return count


class _Finder:
    """Finds the counter's module, for the first import of it, as one that registers what waits when it has been run."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run(module)
            _register()

        spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


_BACKENDS = ("CPU", "CUDA", "PrivateUse1")  # PrivateUse1: NPU tensors


class OperatorLibrary:
    """The operators of one package, in a torch namespace of their own.

    Where nothing but autograd would see a call, it skips the dispatcher, which takes longer than a small kernel runs.
    """

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._library = torch.library.Library(namespace, "DEF")
        self._implementations: dict[str, Callable[..., Any]] = {}
        self._forward_mode: dict[str, bool] = {}
        self._gradients: set[str] = set()
        self._direct: dict[str, Callable[..., Any]] = {}  # what is called where the dispatcher is bypassed
        self._dispatched: dict[str, Callable[..., Any]] = {}  # the dispatcher's calls

    def define(
        self,
        schema: str,
        implementation: Callable[..., Any],
        fake: Callable[..., Any],
        *,
        forward_mode: bool = False,
        batched: Callable[..., Any] | None = None,
        flops: Callable[..., int] | None = None,
    ) -> None:
        """Register an operator.

        Args:
            schema: name, arguments without default values, and results.
            implementation: computes the operator for tensors of any backend, without autograd. Among several results, one
                that was not asked for is None; in a list of results its schema says so, `Tensor?[]`.
            fake: the same for tensors that have shapes and no data.
            forward_mode: whether PyTorch can differentiate what `implementation` does in plain PyTorch. Then that runs for
                tensors with tangents, on any device; otherwise those are refused.
            batched: computes, in plain PyTorch, the operator for the tensors of torch.func.vmap and of several upstream
                gradients at once (`is_grads_batched`); None: PyTorch calls the operator for each of them, which it can
                where no tensors stand in lists.
            flops: counts, for the arguments, what `torch.utils.flop_counter` is to count: the products of matrices of the
                model that calls it. What is computed a second time to save memory does not count. None: 0.
        """
        name = schema.partition("(")[0]
        self._library.define(schema)
        overload = self._operator(name).default
        self._dispatched[name] = overload._op
        if not overload._schema.is_mutable:  # the dispatcher tells autograd what was written to
            self._shorten(overload)
        for backend in _BACKENDS:
            self._library.impl(name, implementation, backend)
        self._library.impl(name, functools.partial(self._with_resolved, name), "Negative")
        torch.library.register_fake(f"{self._namespace}::{name}", fake, lib=self._library)
        self._implementations[name] = self._direct[name] = implementation
        self._forward_mode[name] = forward_mode
        if flops is not None:
            count_flops(self._operator(name), flops)
        if batched is not None:
            for key in ("FuncTorchBatched", "Batched"):
                self._library.impl(name, functools.partial(self._with_several, name, batched), key)

    def compose(self, schema: str, function: Callable[..., Any]) -> None:
        """Register what is made of other operators, and may return views of its arguments.

        A compiler's graph, fake tensors, modes and transforms have the operators that it calls.

        Args:
            schema: as for `define`; views are annotated.
            function: takes the arguments. It sees to gradients itself, and to tangents.
        """
        name = schema.partition("(")[0]
        self._library.define(schema)
        for key in ("CompositeImplicitAutograd", "FuncTorchBatched"):
            self._library.impl(name, function, key)
        self._direct[name], self._dispatched[name] = function, self._operator(name).default._op

    def autograd(self, name: str, record: Callable[..., Any]) -> None:
        """Set what the operator does where autograd may record it: mostly `apply` of a `Function`.

        Args:
            name: the operator.
            record: takes `run` and the operator's arguments. `run` is the operator without its gradient: through the
                dispatcher, or where that is bypassed the implementation itself.
        """
        below_autograd = functools.partial(self.below_autograd, name)

        def unless_forward(*arguments: Any) -> Any:
            if forward_mode(arguments):
                return self._with_tangents(name, *arguments)
            return record(below_autograd, *arguments)

        self._library.impl(name, unless_forward, "Autograd")
        self._direct[name] = functools.partial(record, self._implementations[name])

    def gradient(self, name: str) -> None:
        """Say that the operator is a gradient: to differentiate it again is an error and not a silent zero."""
        self.autograd(name, functools.partial(self.not_differentiable, name))
        self._gradients.add(name)

    def not_differentiable(self, name: str, run: Callable[..., Any], *arguments: Any) -> Any:
        """run(*arguments), gradients: to differentiate them is an error that names an operator, and not a silent zero."""
        if any(is_mapped(tensor) or _is_one_of_several(tensor) for tensor in _tensors(arguments)):
            outer = [tensor for tensor in _tensors(arguments) if tensor.requires_grad]
            return self._refused_by_outer_levels(name, run(*arguments), outer)
        return _not_differentiable(f"{self._namespace}::{name}", run, *arguments)

    def __call__(self, name: str, *arguments: Any) -> Any:
        """Call an operator, all of its arguments in order: a gradient too, from the backward of an autograd function."""
        if dry_runs:
            return self._direct[name](*arguments)
        if is_unobserved():
            direct = self._direct[name]
            if not torch.is_grad_enabled() and name in self._implementations:  # nothing is to be recorded
                direct = self._implementations[name]
            if all_plain(arguments):
                return direct(*arguments)
        if is_dynamo_compiling():
            return self._operator(name)(*arguments)  # which it knows
        return self._dispatched[name](*arguments)

    def below_autograd(self, name: str, *arguments: Any) -> Any:
        """Call an operator that autograd is not to record."""
        if can_bypass_dispatcher(arguments):
            return self._implementations[name](*arguments)
        if not is_in_transform():
            with torch._C._AutoDispatchBelowAutograd():
                return self._operator(name)(*arguments)
        with outer_levels():
            return self._operator(name)(*arguments)

    def _shorten(self, overload: Any) -> None:
        """Let code that a compiler generated, which calls operators by their overloads, skip the dispatcher as well."""
        name, dispatched = overload._opname, overload._op  # that is what OpOverload.__call__ calls

        def run(*arguments: Any, **named: Any) -> Any:
            return dispatched(*arguments, **named) if named else self(name, *arguments)

        overload._op = run

    def _with_resolved(self, name: str, *arguments: Any) -> Any:
        """Call an operator for tensors some of whose memory has the other sign: for copies of those.

        PyTorch would do it, but not for every operator that writes to its arguments.
        """
        overload = self._operator(name).default
        resolved = tree_map(lambda leaf: leaf.resolve_neg() if isinstance(leaf, Tensor) else leaf, arguments)
        results = overload(*resolved)
        for parameter, *both in zip(overload._schema.arguments, arguments, resolved, strict=True):
            if parameter.is_write:
                for given, used in zip(*map(tree_leaves, both), strict=True):
                    if used is not given:
                        given.copy_(used)
        return results

    def _with_several(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Compute an operator in plain PyTorch, which outer levels of torch.func record."""
        with plain_pytorch():
            results = function(*arguments)
        return self._refused_by_outer_levels(name, results, []) if name in self._gradients else results

    def _refused_by_outer_levels(self, name: str, results: Any, sources: Sequence[Tensor]) -> Any:
        """Gradients, to differentiate which is an error that names the operator, as far as they or the sources depend on it.

        For several upstream gradients at once they are computed in plain PyTorch, which autograd records, and the levels of
        torch.func below that of vmap: they would be differentiated as if what the forward saved were constant. So a copy of
        each is taken by an operator that PyTorch calls at those levels, where it is a gradient.
        """
        if not torch.is_grad_enabled():
            return results

        def refused(result: Any) -> Any:
            if isinstance(result, Tensor):
                for source in (result, *sources):
                    result = self._gradient_at_outer_levels(result, source, f"{self._namespace}::{name}")
            return result

        return tree_map(refused, results)

    @functools.cached_property
    def _gradient_at_outer_levels(self) -> Any:
        library = OperatorLibrary(f"{self._namespace}_gradients")
        library.define(
            "copy(Tensor value, Tensor source, str of) -> Tensor",
            lambda value, source, of: value.clone(),
            lambda value, source, of: torch.empty_like(value),
            forward_mode=True,
        )
        library.autograd("copy", lambda run, value, source, of: _not_differentiable(of, run, value, source, of))
        copy = library._operator("copy").default

        def of_several(info: Any, dims: Any, value: Tensor, source: Tensor, of: str) -> tuple[Tensor, int | None]:
            return copy(value, source, of), dims[0]

        torch.library.register_vmap(f"{library._namespace}::copy", of_several, lib=library._library)
        return copy

    def _with_tangents(self, name: str, *arguments: Any) -> Any:
        if not self._forward_mode[name]:
            raise NotImplementedError(
                f"{self._namespace}::{name} has no forward-mode derivative (torch.func.jvp, jacfwd and hessian, or "
                "torch.autograd.forward_ad): use torch.func.grad, vjp or jacrev, or the same in PyTorch's own operators."
            )
        with plain_pytorch():
            return self._implementations[name](*arguments)

    def _operator(self, name: str) -> Any:
        return getattr(getattr(torch.ops, self._namespace), name)


def _not_differentiable(name: str, run: Callable[..., Any], *arguments: Any) -> Any:
    if not needs_gradient(arguments):
        return run(*arguments)
    leaves, structure = tree_flatten(arguments)
    results = _Results()
    flat = apply(_Gradient, run, name, structure, results, *leaves)
    return tree_unflatten(flat, results.structure)


class _Results:
    """The lists that a call's results stood in: autograd takes them one after another."""

    structure: TreeSpec


class _Gradient(Function):
    @staticmethod
    def forward(ctx, run, name, structure, results, *leaves):  # type: ignore[no-untyped-def]
        ctx.name = name
        found = run(*tree_unflatten(leaves, structure))
        flat, results.structure = tree_flatten(found)
        return tuple(flat)

    @staticmethod
    def backward(ctx, *gradients):  # type: ignore[no-untyped-def]
        raise NotImplementedError(f"{ctx.name} is a gradient and has none itself: there is no second derivative.")
