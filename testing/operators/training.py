"""The public functions in a training step: checkpoints, autocast, saved tensors, batches, captured graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .case import DEVICES, Call, Case, asked, dense, differing, of_function, of_gradient, only_at

if TYPE_CHECKING:
    from npu_offline.plugin import Place

_GRAPHS = ("cuda", "npu")


def _equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@only_at(*DEVICES)
@asked(of_gradient)
@pytest.mark.usefixtures("npu_poisoned")
def test_activation_checkpointing(npu_place: Place, case: Case) -> None:
    call = case.draw(npu_place.torch)
    expected = call.results()
    for reentrant in (False, True):
        leaves = call.leaves()
        value = checkpoint(call.floats, *leaves, use_reentrant=reentrant)
        torch.sin(value).sum().backward()
        _equal([dense(leaf.grad) for leaf in leaves if leaf.grad is not None], expected[-len(leaves) :])
        _equal([value.detach()], [call.floats(*call.trained)])


@only_at(*DEVICES)
@asked(of_function)
def test_autocast(npu_place: Place, case: Case) -> None:
    """Inputs in `cast` are cast to 16 bits, as a linear layer's are, and gradients back; other dtypes stay as they are."""
    call = case.draw(npu_place.torch)
    narrow = list(call.tensors)
    for at in case.cast:
        narrow[at] = narrow[at].bfloat16()
    expected = Call(case, narrow, call.places)
    with torch.autocast(npu_place.torch.type, dtype=torch.bfloat16):
        found = call.results()
        of_narrow = case.draw(npu_place.torch, dtype=torch.bfloat16)
        already_narrow = of_narrow.outputs(*of_narrow.trained)
    wanted = expected.results()
    first = len(wanted) - len(call.trained)  # gradient
    _equal(found, wanted[:first] + [one.to(of.dtype) for one, of in zip(wanted[first:], call.trained, strict=True)])
    _equal(already_narrow, of_narrow.outputs(*of_narrow.trained))


@only_at(*DEVICES)
@asked(lambda case: case.saved is not None)
def test_saves_what_the_backward_reads_and_nothing_else(npu_place: Place, case: Case) -> None:
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    call = case.draw(npu_place.torch)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        case.function(*call.given(call.leaves()))
        assert tuple(sorted(tensor.numel() for tensor in saved)) == case.saved
        saved.clear()
        with torch.no_grad():
            case.function(*call.given(call.leaves()))
    assert saved == []


@only_at(*DEVICES)
@asked(of_function)
def test_inference_mode(npu_place: Place, case: Case) -> None:
    with torch.inference_mode():
        call = case.draw(npu_place.torch)
        found = call.outputs(*call.trained)
    call = case.draw(npu_place.torch)
    _equal(found, call.outputs(*call.trained))


@only_at(*DEVICES)
@asked(of_gradient)
def test_an_input_made_in_inference_mode_is_taken_where_the_definition_takes_it(npu_place: Place, case: Case) -> None:
    """Such as the states of a frozen model. The other inputs are trained."""
    for at in range(len(case.draw().trained)):

        def gradients(function: Any = None, device: Any = npu_place.torch, at: int = at) -> list[Tensor]:
            call = case.draw(device)
            leaves = call.leaves()
            with torch.inference_mode():
                made = leaves[at].detach().clone()
            trained = [each for place, each in enumerate(leaves) if place != at]
            value = call.scalar(*leaves[:at], made, *leaves[at + 1 :], function=function)
            return [dense(one) for one in torch.autograd.grad(value, trained)] if value.requires_grad else []

        if case.definition is not None:
            try:
                gradients(case.definition, "cpu")
            except RuntimeError as error:  # as a linear layer
                assert "nference" in str(error)
                continue
            call = case.draw(npu_place.torch)
            expected = call.gradients(call.leaves())
            found = gradients()
            _equal(found, [dense(one) for place, one in enumerate(expected) if place != at][: len(found)])


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.few(2)
@asked(table="BATCHES")
@pytest.mark.usefixtures("npu_poisoned")
def test_no_token_depends_on_the_others(npu_place: Place, case: Case) -> None:
    """Its bits are the same among any other tokens, however many there are, and in any place."""
    n, device = case.tokens, npu_place.torch
    dims = case.token_dims()
    some, more = ([output.detach() for output in case.draw(tokens=t).outputs(*case.draw(tokens=t).trained)] for t in (3, 5))
    of_results = [differing(*pair) for pair in zip(some, more, strict=True)]
    whole, others = case.draw(device), case.draw(device, seed=1)

    def run(change: Callable[[Tensor, Tensor, int], Tensor]) -> list[Tensor]:
        tensors = [
            one if dim is None else change(one, other, dim)
            for one, other, dim in zip(whole.tensors, others.tensors, dims, strict=True)
        ]
        call = Call(case, tensors, whole.places)
        return call.outputs(*call.trained)

    def check(found: list[Tensor], places: Any) -> None:
        for one, wanted, dim in zip(found, every, of_results, strict=True):
            if dim is not None:
                assert torch.equal(one, wanted.index_select(dim, places))

    with _threads(3):
        every = run(lambda one, other, dim: one)
        assert any(dim is not None for dim in of_results)
        at = torch.arange(n, device=device)
        for first, last in ((0, 1), (5, 6), (n - 1, n), (0, 2), (3, 10), (n // 2, n - 6), (1, n)):
            check(run(lambda one, other, dim: one.narrow(dim, first, last - first)), at[first:last])  # noqa: B023
            check(run(lambda one, other, dim: one.narrow(dim, first, last - first).clone()), at[first:last])  # noqa: B023
        order = torch.randperm(n, generator=torch.Generator().manual_seed(2)).to(device)
        check(run(lambda one, other, dim: one.index_select(dim, order)), order)
        behind = run(lambda one, other, dim: torch.cat((other, one), dim))
        check([one if d is None else one.narrow(d, n, n) for one, d in zip(behind, of_results, strict=True)], at)
        among = run(lambda one, other, dim: torch.stack((one, other), dim + 1).flatten(dim, dim + 1))
        check([one if d is None else one.index_select(d, 2 * at) for one, d in zip(among, of_results, strict=True)], at)


def _step(call: Call) -> Callable[[], list[Tensor]]:
    leaves = [tensor.requires_grad_() for tensor in call.trained]

    def step() -> list[Tensor]:
        outputs = call.outputs(*leaves)
        roots = [output for output in outputs if output.requires_grad]
        return [*outputs, *torch.autograd.grad(roots, leaves, [torch.ones_like(root) for root in roots])]

    return step


@only_at(*_GRAPHS)
@asked(of_gradient)
def test_nothing_waits_for_the_device(npu_place: Place, npu_no_waits: Any, case: Case) -> None:
    step = _step(case.draw(npu_place.torch))
    step()  # compiles
    with npu_no_waits():
        step()


@only_at(*_GRAPHS)
@asked(of_gradient)
def test_graph_capture(npu_place: Place, npu_capture: Any, case: Case) -> None:
    call = case.draw(npu_place.torch)
    captured, replay = npu_capture(_step(call))
    with torch.no_grad():
        for tensor, other in zip(call.tensors, case.draw(npu_place.torch, seed=1).tensors, strict=True):
            tensor.copy_(other)
    replay()
    for replayed, eager in zip(captured, _step(call)(), strict=True):
        assert torch.equal(replayed, eager)
