"""An operator of two lines, registered the way the packages register theirs: the squares of a list's tensors, scaled."""

import contextlib

import pytest
import torch
from npu_tiling.dispatch import Function, OperatorLibrary, apply, can_bypass_dispatcher, needs_gradient
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

OPERATORS = OperatorLibrary("npu_tiling_test")
calls = []


def _squares(tensors, factor):
    calls.append("squares")
    return [tensor * tensor * factor for tensor in tensors]


def _squares_backward(gradients, tensors, factor):
    calls.append("squares_backward")
    return [2 * factor * gradient * tensor for gradient, tensor in zip(gradients, tensors, strict=True)]


def _double_(x):
    calls.append("double_")
    x.mul_(2)


def _double_all_(tensors):
    for tensor in tensors:
        _double_(tensor)


def _some(tensors, wanted):
    return [tensor.clone() if wanted else None for tensor in tensors], None


def _like(tensors, *others):
    return [torch.empty_like(tensor) for tensor in tensors]


class Squares(Function):
    @staticmethod
    def forward(ctx, run, factor, *tensors):
        ctx.save_for_backward(*tensors)
        ctx.factor = factor
        return tuple(run(tensors, factor))

    @staticmethod
    def backward(ctx, *gradients):
        return None, None, *OPERATORS("squares_backward", gradients, ctx.saved_tensors, ctx.factor)


def _squares_autograd(run, tensors, factor):
    if needs_gradient((tensors,)):
        return list(apply(Squares, run, factor, *tensors))
    return run(tensors, factor)


OPERATORS.define("squares(Tensor[] tensors, float factor) -> Tensor[]", _squares, _like)
OPERATORS.define(
    "squares_backward(Tensor[] gradients, Tensor[] tensors, float factor) -> Tensor[]", _squares_backward, _like
)
OPERATORS.define("some(Tensor[] tensors, bool wanted) -> (Tensor?[] copies, Tensor sum)", _some, _some)
OPERATORS.define("double_(Tensor(a!) x) -> ()", _double_, lambda x: None)
OPERATORS.define("double_all_(Tensor(a!)[] x) -> ()", _double_all_, lambda x: None)
OPERATORS.autograd("squares", _squares_autograd)
OPERATORS.gradient("squares_backward")


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.names.append(function.name())
        return function(*arguments, **(keywords or {}))


class Wrapped(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        calls.append(f"seen {getattr(function, '__name__', function)}")
        return super().__torch_function__(function, types, arguments, keywords or {})


@pytest.fixture(autouse=True)
def _no_calls():
    calls.clear()


def two_leaves():
    return [torch.randn(3, requires_grad=True), torch.randn(2, requires_grad=True)]


def test_gradients_of_a_list():
    leaves = two_leaves()
    first, second = OPERATORS("squares", leaves, 3.0)
    found = torch.autograd.grad(first.sum() + second.sum(), leaves)
    for gradient, leaf in zip(found, leaves, strict=True):
        torch.testing.assert_close(gradient, 6 * leaf.detach())
    assert calls == ["squares", "squares_backward"]


def test_an_implementation_reads_memory_that_has_the_sign_of_its_tensors(monkeypatch):
    seen = []

    def squares_backward(gradients, tensors, factor):
        seen.extend(tensor.is_neg() for tensor in (*gradients, *tensors))
        return _squares_backward(gradients, tensors, factor)

    monkeypatch.setitem(OPERATORS._direct, "squares_backward", squares_backward)
    x = torch._neg_view(torch.ones(3)).requires_grad_()
    (y,) = OPERATORS("squares", [x], 3.0)
    (gradient,) = torch.autograd.grad(y, x, torch._neg_view(torch.ones(3)))
    assert calls == ["squares", "squares_backward"] and not any(seen)
    assert torch.equal(gradient, torch.full((3,), 6.0))


def test_an_operator_writes_to_memory_that_has_the_other_sign():
    memory = torch.ones(3)
    OPERATORS("double_", torch._neg_view(memory))
    OPERATORS("double_all_", [torch.ones(3), torch._neg_view(memory)])
    assert torch.equal(memory, torch.full((3,), 4.0))


def test_a_plain_call_skips_the_dispatcher_and_a_watched_one_does_not(monkeypatch):
    plain = [leaf.detach() for leaf in two_leaves()]
    with Seen() as seen:
        OPERATORS("squares", plain, 3.0)
    assert "npu_tiling_test::squares" in seen.names
    assert can_bypass_dispatcher((plain, 3.0)) and not can_bypass_dispatcher(([plain[0], plain[1].as_subclass(Wrapped)],))
    monkeypatch.setattr(OPERATORS, "_operator", None)  # what a call through the dispatcher needs
    OPERATORS("squares", plain, 3.0)
    with pytest.raises(TypeError), Seen():
        OPERATORS("squares", plain, 3.0)


def test_generated_code_skips_the_dispatcher_and_a_mode_still_sees_the_call(monkeypatch):
    squares, double_ = torch.ops.npu_tiling_test.squares.default, torch.ops.npu_tiling_test.double_.default
    x = torch.ones(3)
    with Seen() as seen:
        squares([x], 3.0)
    assert "npu_tiling_test::squares" in seen.names
    monkeypatch.setattr(OPERATORS, "_direct", {})  # what a call without the dispatcher looks up
    for plain in (lambda: squares([x], 3.0), lambda: OPERATORS("squares", [x], 3.0)):
        with pytest.raises(KeyError):
            plain()
    double_(x)
    assert x._version == 1  # the dispatcher told autograd


@pytest.mark.parametrize("mode", [contextlib.nullcontext, FakeTensorMode])
def test_the_dispatcher_has_none_for_what_was_not_asked_for(mode):
    with mode():
        for some in (torch.ops.npu_tiling_test.some, torch.ops.npu_tiling_test.some.default):
            assert some([torch.ones(3)], False) == ([None], None)
        (copy,), _ = torch.ops.npu_tiling_test.some([torch.ones(3)], True)
        assert copy.shape == (3,)
    assert OPERATORS("some", [torch.ones(3)], False) == ([None], None)


def test_the_implementation_is_called_directly_where_the_dispatcher_is_bypassed(monkeypatch):
    monkeypatch.setattr(OPERATORS, "below_autograd", None)  # would ask once more who observes
    leaves = two_leaves()
    first, _ = OPERATORS("squares", leaves, 3.0)
    first.sum().backward()
    assert calls == ["squares", "squares_backward"]


def test_a_tensor_subclass_sees_the_operator():
    OPERATORS("squares", [torch.randn(3).as_subclass(Wrapped)], 3.0)
    assert any(call.startswith("seen") and "squares" in call for call in calls)


def test_a_gradient_is_not_differentiated_again():
    leaves = two_leaves()
    first, _ = OPERATORS("squares", leaves, 3.0)
    (gradient,) = torch.autograd.grad(first.sum(), leaves[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="::squares_backward is a gradient and has none itself"):
        gradient.sum().backward()


def test_an_operator_without_a_gradient_runs_plainly():
    x = torch.ones(2)
    OPERATORS("double_", x)
    assert calls == ["double_"] and x.tolist() == [2, 2]


def test_torch_func_and_compile():
    x = torch.randn(4)
    found = torch.func.grad(lambda x: OPERATORS("squares", [x], 3.0)[0].sum())(x)
    torch.testing.assert_close(found, 6 * x)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.func.grad(lambda x: torch.func.grad(lambda x: OPERATORS("squares", [x], 3.0)[0].sum())(x).sum())(x)
    compiled = torch.compile(lambda x: OPERATORS("squares", [x], 3.0)[0], fullgraph=True, backend="aot_eager")
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(compiled(leaf).sum(), leaf)
    torch.testing.assert_close(gradient, 6 * x)


def test_tensors_without_data():
    (shape,) = OPERATORS("squares", [torch.randn(4, device="meta")], 3.0)
    assert shape.is_meta and calls == []
