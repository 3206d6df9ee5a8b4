"""Operators registered with PyTorch whose calls cost little on the host. Imports torch; `npu_tiling` itself does not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from ..chips.detection import dry_runs, plain_pytorch
from .autograd import (
    Function,
    all_plain,
    apply,
    can_bypass_dispatcher,
    forward_mode,
    is_in_transform,
    is_unobserved,
    needs_gradient,
    outer_levels,
)
from .flops import count_flops

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
                self._library.impl(name, _plain(batched), key)

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

    def not_differentiable(self, name: str, run: Callable[..., Any], *arguments: Any) -> Any:
        """run(*arguments), gradients: to differentiate them is an error that names an operator, and not a silent zero."""
        if not needs_gradient(arguments):
            return run(*arguments)
        leaves, structure = tree_flatten(arguments)
        results = _Results()
        flat = apply(_Gradient, run, f"{self._namespace}::{name}", structure, results, *leaves)
        return tree_unflatten(flat, results.structure)

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


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        with plain_pytorch():
            return function(*arguments)

    return run


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
