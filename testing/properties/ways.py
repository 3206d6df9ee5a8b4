"""Calls a function of tensors in the ways that programs do; returns outputs and gradients on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Function = Callable[..., Sequence[Tensor]]  # tensors or None -> differentiable outputs
Way = str
#: "plain", and ways that must give the same results.
WAYS: tuple[Way, ...] = (
    "plain",
    "plain",
    "twice through one graph",
    "backward",
    "no_grad",
    "inference_mode",
    "autocast",
    "checkpoint",
    "reentrant checkpoint",
    "torch.func",
    "views of leaves",
)


class Results(NamedTuple):
    """Outputs, and a gradient for each input, None where it requires none; no gradients where there is no graph."""

    outputs: list[Tensor]
    gradients: list[Tensor | None] | None


def call(
    way: Way,
    function: Function,
    inputs: Sequence[Tensor | None],
    trains: Sequence[bool],
    upstream: Callable[[Sequence[Tensor]], list[Tensor | None]],
    device: torch.device,
) -> Results:
    """Outputs of `function` and gradients of the inputs that require them.

    Args:
        inputs: on the CPU; strides and offsets are kept where they are moved.
        upstream: returns the outputs' gradients, on the CPU, from the outputs; None for no gradient.
    """
    placed = [None if tensor is None else place(tensor, device) for tensor in inputs]
    if way in ("no_grad", "inference_mode") or not any(trains):
        context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(way, contextlib.nullcontext)
        with context():
            outputs = list(function(*placed))
        assert not any(output.requires_grad for output in outputs)
        return Results([output.cpu() for output in outputs], None)
    if way == "torch.func":
        return _functional(function, placed, trains, upstream, device)
    leaves = [
        tensor.detach().requires_grad_() if tensor is not None and train else tensor
        for tensor, train in zip(placed, trains, strict=True)
    ]
    given = leaves
    if way == "views of leaves":
        given = [leaf.view_as(leaf) if leaf is not None and leaf.requires_grad else leaf for leaf in leaves]
    with torch.autocast(device.type, torch.bfloat16) if way == "autocast" else contextlib.nullcontext():
        if "checkpoint" in way:
            outputs = list(checkpoint(lambda *tensors: tuple(function(*tensors)), *given, use_reentrant=way != "checkpoint"))
        else:
            outputs = list(function(*given))
    seeds = upstream(outputs)
    chosen = [
        (output, seed) for output, seed in zip(outputs, seeds, strict=True) if seed is not None and output.requires_grad
    ]
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    detached = [output.detach().cpu() for output in outputs]
    if not chosen:
        return Results(detached, [None] * len(leaves))

    def gradients(keep: bool) -> list[Tensor | None]:
        roots, into = [output for output, _ in chosen], [place(seed, device) for _, seed in chosen]
        if way in ("backward", "reentrant checkpoint"):  # which refuses torch.autograd.grad
            torch.autograd.backward(roots, into, retain_graph=keep)
            return [leaf.grad for leaf in wanted]
        return list(torch.autograd.grad(roots, wanted, into, retain_graph=keep, allow_unused=True))

    found = gradients(way == "twice through one graph")
    if way == "twice through one graph":
        first = [None if gradient is None else gradient.clone() for gradient in found]
        found = gradients(False)
        for before, after in zip(first, found, strict=True):
            assert (before is None) == (after is None)
            assert before is None or same_bits(before, after), "the second backward through a graph gives something else"  # type: ignore[arg-type]
    every = iter(found)
    return Results(detached, [_on_cpu(next(every)) if leaf is not None and leaf.requires_grad else None for leaf in leaves])


def place(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on a device, with the same strides, the same offset in its storage and the same sign there."""
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    copy = storage.to(device, copy=True)
    copy = copy.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return torch._neg_view(copy) if tensor.is_neg() else copy


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal, NaNs included."""
    if a.layout != b.layout or a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_sparse:
        a, b = a.to_dense(), b.to_dense()
    return bool(((a == b) | (a.isnan() & b.isnan())).all()) if a.is_floating_point() else torch.equal(a, b)


def _functional(
    function: Function,
    placed: Sequence[Tensor | None],
    trains: Sequence[bool],
    upstream: Callable[[Sequence[Tensor]], list[Tensor | None]],
    device: torch.device,
) -> Results:
    at = [i for i, train in enumerate(trains) if train and placed[i] is not None]

    kinds: list[bool] = []  # by output: whether it is of floating point, and so differentiable

    def of_primals(*primals: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        inputs = list(placed)
        for i, primal in zip(at, primals, strict=True):
            inputs[i] = primal
        outputs = tuple(function(*inputs))
        kinds[:] = [output.is_floating_point() for output in outputs]
        return tuple(o for o in outputs if o.is_floating_point()), tuple(o for o in outputs if not o.is_floating_point())

    results: Any = torch.func.vjp(of_primals, *[placed[i] for i in at], has_aux=True)
    floats, pull, others = results
    each = {True: iter(floats), False: iter(others)}
    outputs = [next(each[kind]) for kind in kinds]
    pairs = zip(outputs, upstream(outputs), strict=True)
    into = [torch.zeros_like(o) if seed is None else place(seed, device) for o, seed in pairs if o.is_floating_point()]
    found = dict(zip(at, pull(tuple(into)), strict=True))
    gradients = [_on_cpu(found[i]) if i in found else None for i in range(len(placed))]
    return Results([output.detach().cpu() for output in outputs], gradients)


def _on_cpu(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().cpu()
