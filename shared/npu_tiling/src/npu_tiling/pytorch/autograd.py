"""What autograd records of a call, and whether anything else sees the call. Imports torch; `npu_tiling` itself does not."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from ..chips.detection import dry_runs

# An operator's autograd kernel runs at one level of torch.func's transforms, which the dispatcher has already chosen: this
# is the Function for that, where torch.autograd.Function would start over at the outermost level.
Function = torch.autograd.function._SingleLevelFunction

# Whether a tensor stands for several upstream gradients, those of `torch.autograd.grad(..., is_grads_batched=True)`.
is_batched = torch._C._functorch.is_legacy_batchedtensor

PLAIN = frozenset((Tensor, Parameter))
"""Types of tensors without a `__torch_dispatch__` or `__torch_function__` of their own."""

_CONSTANTS = frozenset((int, float, bool, str, torch.dtype, type(None)))
_transformed = threading.local()  # .recording: inside `apply` under a transform
_ever_transformed = False


def apply(function: type[Any], *arguments: Any) -> Any:
    """`function.apply(...)` of a `Function`, under torch.func's transforms too."""
    if not torch._C._are_functorch_transforms_active():
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


def forward_mode(arguments: Sequence[Any]) -> bool:
    """Whether one of these arguments has a tangent; tensors may stand in lists."""
    return forward_ad._current_level >= 0 and _any_has_tangent(arguments)


def _any_has_tangent(arguments: Sequence[Any]) -> bool:
    for argument in arguments:
        if isinstance(argument, Tensor):
            if forward_ad.unpack_dual(argument).tangent is not None:
                return True
        elif isinstance(argument, (list, tuple)) and _any_has_tangent(argument):
            return True
    return False


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
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # a leaf whose gradient `grad` returns, or a backward without an engine
        return True


def can_bypass_dispatcher(arguments: Sequence[Any]) -> bool:
    """Whether nothing but autograd would see an operator's call: plain tensors with data, no tracing, mode or transform.

    In a dry run it is True: for tensors without data the dispatcher would call the fake function, which launches nothing.
    """
    return bool(dry_runs) or is_unobserved() and all_plain(arguments)


def is_unobserved() -> bool:
    """Whether no tracing, mode or transform sees operators' calls."""
    if is_dynamo_compiling():  # the operator would be traced into, and not captured
        return False
    if torch._C._are_functorch_transforms_active():  # levels of grad and vmap would be skipped; wrappers have no data
        return False
    if forward_ad._current_level >= 0:  # tangents would be dropped in silence
        return False
    # A mode would not see the call: fake tensors, counters, selective checkpoints.
    return not torch._C._len_torch_dispatch_stack() and not torch._C._len_torch_function_stack()


def all_plain(arguments: Sequence[Any]) -> bool:
    """Whether all tensors have data of their own: those of DTensors and other subclasses would be read as plain tensors."""
    for argument in arguments:
        kind = type(argument)
        if kind in _CONSTANTS:  # nothing to ask: most arguments, in every call
            continue
        if kind in PLAIN:
            if argument.is_meta or argument.is_neg() or is_batched(argument):  # no data, or data with the other sign
                return False
            if _ever_transformed and torch._C._functorch.is_functorch_wrapped_tensor(argument):
                return False  # after a transform what a Function saved under it is still wrapped
        elif isinstance(argument, (list, tuple)):  # asked before whether it is a tensor, which takes longer to deny
            if not all_plain(argument):
                return False
        elif isinstance(argument, Tensor):
            return False
    return True
