"""A recognised call of an operator that autograd need not record is repeated, without a look at each of its tensors."""

import pytest
import torch
from npu_tiling.pytorch import library, repeats
from npu_tiling.pytorch.autograd import Function, apply, needs_gradient
from npu_tiling.pytorch.library import OperatorLibrary
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode

OPERATORS = OperatorLibrary("npu_tiling_recognised")
decided = []


def _double(x):
    decided.append(x)
    return x * 2


class Double(Function):
    @staticmethod
    def forward(ctx, run, x):
        return run(x)

    @staticmethod
    def backward(ctx, gradient):
        return None, OPERATORS("double", gradient)


OPERATORS.define("double(Tensor x) -> Tensor", _double, torch.empty_like)
OPERATORS.autograd("double", lambda run, x: apply(Double, run, x) if needs_gradient((x,)) else run(x))


class Wrapped(torch.Tensor):
    pass


@pytest.fixture(autouse=True)
def recognised(monkeypatch):
    """Calls of the operator with a tensor of 4 x 4 are recognised, whether it requires a gradient or not."""
    monkeypatch.setattr(repeats, "_index_of", lambda tensor: 0)
    with torch.no_grad():
        for number in range(6):
            OPERATORS("double", torch.ones(4, 4, requires_grad=number == 0))
        OPERATORS("double", torch.ones(4, 4, requires_grad=True))
    decided.clear()


def of_a_compiler(x):
    return torch.ops.npu_tiling_recognised.double.default(x)


@pytest.mark.parametrize("call", [lambda x: OPERATORS("double", x), of_a_compiler], ids=["ours", "of a compiler"])
def test_its_tensors_are_not_looked_at(monkeypatch, call):
    monkeypatch.setattr(library, "all_plain", None)
    x = torch.randn(4, 4)
    with torch.no_grad():
        assert torch.equal(call(x), 2 * x) and not decided
        with pytest.raises(TypeError):
            call(torch.randn(4, 5))
    with pytest.raises(TypeError):
        call(x)


def test_gradients_are_recorded():
    x = torch.randn(4, 4, requires_grad=True)
    y = OPERATORS("double", x)
    (dx,) = torch.autograd.grad(y, x, x.detach())
    assert y.requires_grad and torch.equal(dx, 2 * x)


@pytest.mark.parametrize("grad", [False, True])
def test_tensors_of_other_kinds_are_not_taken_for_plain_ones(grad):
    x = torch.randn(4, 4)
    with torch.set_grad_enabled(grad):
        assert torch.equal(OPERATORS("double", torch._neg_view(x)), -2 * x)
        assert OPERATORS("double", x.to("meta")).is_meta
        assert type(OPERATORS("double", x.as_subclass(Wrapped))) is Wrapped
        assert torch.equal(OPERATORS("double", torch.zeros(17)[1:].view(4, 4)), torch.zeros(4, 4))
        assert OPERATORS("double", x.double()).dtype == torch.float64


@pytest.mark.parametrize("grad", [False, True])
def test_sizes_without_numbers_are_no_sizes_of_equal_calls(grad):
    with torch.set_grad_enabled(grad), FakeTensorMode(shape_env=ShapeEnv()) as mode:
        fake = mode.from_tensor(torch.randn(4, 4), static_shapes=False)
    with torch.set_grad_enabled(grad):
        assert OPERATORS("double", fake).shape == fake.shape


def test_a_mode_sees_the_operator_that_is_called():
    seen = []

    class Seen(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Seen():
        assert torch.equal(of_a_compiler(torch.ones(4, 4)), torch.full((4, 4), 2.0))
    assert torch.ops.npu_tiling_recognised.double.default in seen


def test_an_argument_that_is_missing_is_named():
    with torch.no_grad(), pytest.raises((TypeError, RuntimeError), match="'x'"):
        torch.ops.npu_tiling_recognised.double.default()


@pytest.mark.parametrize("grad", [False, True])
def test_modes_and_transforms_see_it(grad):
    x = torch.randn(4, 4)
    with torch.set_grad_enabled(grad):
        with FakeTensorMode() as mode:
            assert type(OPERATORS("double", mode.from_tensor(x))) is type(mode.from_tensor(x))
        assert torch.equal(
            torch.vmap(lambda row: OPERATORS("double", row))(torch.stack([x, x + 1])), 2 * torch.stack([x, x + 1])
        )
        compiled = torch.compile(lambda one: OPERATORS("double", one) + 1, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), 2 * x + 1)
    assert torch.equal(torch.func.grad(lambda one: OPERATORS("double", one).sum())(x), torch.full((4, 4), 2.0))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError):
        OPERATORS("double", forward_ad.make_dual(x, x))
