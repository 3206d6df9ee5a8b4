"""Derivatives of the public functions: PyTorch's transforms, against the definition and against autograd."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from .case import DEVICES, Case, asked, close, dense, joined, of_gradient, only_at, transposed

if TYPE_CHECKING:
    from npu_offline.plugin import Place


def _wide(place: Place) -> tuple[torch.dtype, float]:
    """The widest dtype that is computed at a place, and how near results are."""
    return (torch.float64, 1e-9) if place.name == "cpu" else (torch.float32, 2e-3)


def _defined(case: Case) -> bool:
    return case.definition is not None


def _near(found: list[Tensor], expected: list[Tensor], within: float) -> None:
    wide = [[one.detach().cpu().double() for one in each] for each in (found, expected)]
    close(wide[0], wide[1], within)


@asked(_defined)
@pytest.mark.usefixtures("npu_poisoned")
def test_result_and_gradients_are_the_definitions(npu_place: Place, case: Case) -> None:
    """Of inputs that lie in memory as they come, and at other strides, as what was saved then does too."""
    dtype, within = _wide(npu_place)
    exact = case.draw(dtype=torch.float64).results(case.definition)
    assert any(gradient.any() for gradient in exact[-len(case.draw().trained) :])
    _near(case.draw(npu_place.torch, dtype=dtype).results(), exact, within)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, transposed):
        _near(case.draw(npu_place.torch, dtype=dtype, strided=True).results(), exact, within)


def _forward_derivatives(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], tangents: Sequence[Tensor]
) -> list[Tensor]:
    """All derivatives that use forward mode: jvp, a dual tensor, jvp of the gradient, the Hessian's blocks."""
    every = tuple(range(len(inputs)))

    def of_sum(*given: Tensor) -> Tensor:
        return torch.sin(function(*given)).sum()

    value, tangent, *_ = torch.func.jvp(function, tuple(inputs), tuple(tangents))
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(function(*map(forward_ad.make_dual, inputs, tangents))).tangent
    of_gradient = torch.func.jvp(torch.func.grad(of_sum, every), tuple(inputs), tuple(tangents))[1]
    return [value, tangent, dual, *of_gradient, torch.func.hessian(of_sum)(*inputs)]


@asked(lambda case: case.tangents and _defined(case))
@pytest.mark.filterwarnings("ignore:.*batching rule")
def test_forward_mode_is_that_of_the_definition(npu_place: Place, case: Case) -> None:
    """jvp, a dual tensor, jvp of the gradient, Hessian."""
    dtype, within = _wide(npu_place)

    def derivatives(device: Any, dtype: torch.dtype, function: Any) -> list[Tensor]:
        call, tangents = case.draw(device, dtype=dtype), case.draw(device, dtype=dtype, seed=1).trained
        return _forward_derivatives(lambda *given: call.floats(*given, function=function), call.trained, tangents)

    _near(derivatives(npu_place.torch, dtype, case.function), derivatives("cpu", torch.float64, case.definition), within)


@asked(lambda case: not (case.tangents or case.option))
def test_a_tangent_is_refused_by_name(npu_place: Place, case: Case) -> None:
    call = case.draw(npu_place.torch)
    for at, tensor in enumerate(call.trained):

        def one(given: Tensor, at: int = at) -> Tensor:
            return call.floats(*(given if i == at else other for i, other in enumerate(call.trained)))

        for way in _TANGENTS:
            with pytest.raises(NotImplementedError, match="has no forward-mode derivative"):
                way(one, tensor)


def _dual(function: Callable[[Tensor], Tensor], tensor: Tensor) -> object:
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(tensor, tensor))


def _of_sum(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda tensor: torch.sin(function(tensor)).sum()


_TANGENTS: tuple[Callable[[Callable[[Tensor], Tensor], Tensor], object], ...] = (
    lambda f, x: torch.func.jvp(f, (x,), (x,)),
    _dual,
    lambda f, x: torch.func.jvp(torch.func.grad(_of_sum(f)), (x,), (x,)),
    lambda f, x: torch.func.hessian(_of_sum(f))(x),
)
_SECOND: tuple[Callable[[Callable[[Tensor], Tensor], Tensor], object], ...] = (  # ways to a second derivative
    lambda f, x: torch.func.grad(lambda x: torch.func.grad(f)(x).square().sum())(x),
    lambda f, x: torch.func.jacrev(torch.func.grad(f))(x),
    lambda f, x: torch.autograd.functional.hvp(f, x, torch.ones_like(x)),
    lambda f, x: torch.func.jacrev(torch.func.jacrev(f))(x),
    lambda f, x: torch.autograd.functional.hessian(f, x, vectorize=True),
    lambda f, x: torch.autograd.grad(_several(f, y := x.detach().requires_grad_()).sum(), y),
)


def _several(function: Callable[[Tensor], Tensor], leaf: Tensor) -> Tensor:
    """Gradients of a leaf for two upstream gradients at once."""
    value = function(leaf)
    upstream = torch.stack([value, 2 * value]).detach()
    return torch.autograd.grad(value, leaf, upstream, is_grads_batched=True, create_graph=True)[0]


@only_at(*DEVICES)
@asked(of_gradient)
def test_second_derivative_is_refused(npu_place: Place, case: Case) -> None:
    """For each input, in every way to ask for it; none gives zeros."""
    call = case.draw(npu_place.torch)
    for at in call.every:
        leaves = call.leaves()
        (gradient,) = torch.autograd.grad(call.scalar(*leaves), leaves[at], create_graph=True)
        with pytest.raises(NotImplementedError, match="no second derivative"):
            (torch.sparse.sum(gradient) if gradient.is_sparse else gradient.sum()).backward()

        def one(given: Tensor, at: int = at) -> Tensor:
            return call.scalar(*(given if i == at else other for i, other in enumerate(call.trained)))

        if gradient.is_sparse:
            continue
        for way in _SECOND:
            with pytest.raises(NotImplementedError, match="no second derivative"):
                way(one, call.trained[at])
        with contextlib.suppress(NotImplementedError):  # of a value that came with its gradient
            found = torch.func.grad(lambda tensor: torch.func.grad_and_value(one)(tensor)[1])(call.trained[at])  # noqa: B023
            close([found], [gradient.detach()])


@asked(of_gradient)
def test_a_result_that_is_changed_in_place_is_differentiated_or_refused_by_autograd(npu_place: Place, case: Case) -> None:
    """Refused where the backward reads it, as PyTorch's own operators refuse it. A view of an argument is left out."""
    call = case.draw(npu_place.torch)

    def doubled(at: int, *, in_place: bool) -> list[Tensor]:
        leaves = call.leaves()
        outputs = call.outputs(*leaves)
        inputs = {tensor.untyped_storage().data_ptr() for tensor in call.given(leaves)}
        if not outputs[at].requires_grad or outputs[at].untyped_storage().data_ptr() in inputs:
            return []
        outputs[at] = outputs[at].mul_(2.0) if in_place else outputs[at] * 2.0
        return list(torch.autograd.grad(torch.sin(joined(outputs)).sum(), leaves, allow_unused=True, materialize_grads=True))

    for at in range(len(call.outputs(*call.leaves()))):
        try:
            found = doubled(at, in_place=True)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error) or "must keep its values" in str(error)
        else:
            close([dense(one) for one in found], [dense(one) for one in doubled(at, in_place=False)])


@pytest.mark.few(2)
@asked(of_gradient)
@pytest.mark.usefixtures("npu_poisoned")
def test_functional_gradients_are_autograds(npu_place: Place, case: Case) -> None:
    """Of torch.func.grad, and of torch.func.vjp where it is pulled back after the call."""
    call = case.draw(npu_place.torch)
    expected = call.gradients(call.leaves())
    close([dense(one) for one in torch.func.grad(call.scalar, call.every)(*call.trained)], expected)
    value, pull = torch.func.vjp(call.floats, *call.trained)[:2]
    close([dense(one) for one in pull(torch.cos(value))], expected)


@pytest.mark.few(2)
@asked(of_gradient)
@pytest.mark.usefixtures("npu_poisoned")
@pytest.mark.filterwarnings("ignore:.*batching rule")
def test_vmap_gives_what_each_call_does(npu_place: Place, case: Case) -> None:
    call = case.draw(npu_place.torch)
    several = [torch.stack([tensor, 2 * tensor]) for tensor in call.trained]

    def results(*trained: Tensor) -> tuple[Tensor, ...]:
        return call.floats(*trained), *torch.func.grad(call.scalar, call.every)(*trained)

    found = torch.func.vmap(results)(*several)
    for i in range(2):
        close([each[i] for each in found], list(results(*(tensor[i] for tensor in several))))


@only_at(*DEVICES)
@asked(of_gradient)
@pytest.mark.usefixtures("npu_poisoned")
@pytest.mark.filterwarnings("ignore:.*batching rule")
def test_several_upstream_gradients_give_what_each_does(npu_place: Place, case: Case) -> None:
    call = case.draw(npu_place.torch)
    leaves = call.leaves()
    value = call.floats(*leaves)
    upstream = torch.stack([value.detach(), value.detach().cos()])
    found = torch.autograd.grad(value, leaves, upstream, is_grads_batched=True, retain_graph=True)
    for i in range(2):
        close([each[i] for each in found], list(torch.autograd.grad(call.floats(*leaves), leaves, upstream[i])))
