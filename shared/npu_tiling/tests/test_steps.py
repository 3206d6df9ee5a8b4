"""Plans whose steps are PyTorch's: they serve where there is no chip, and options of several records stand side by side."""

from typing import NamedTuple

import npu_tiling
import pytest
import torch
from npu_tiling.calls import Empty
from npu_tiling.dispatch import OperatorLibrary
from npu_tiling.operators import Operator
from npu_tiling.plans import Plan
from torch import Tensor

from testing.steps import run_once

LIBRARY = OperatorLibrary("npu_tiling_test_steps")


class Shared(NamedTuple):
    """Options of several records."""

    factor: float = 2.0
    limit: int | None = None
    dtype: torch.dtype | None = None


class Summed(NamedTuple):
    """The sum of products of rows."""

    x: Tensor
    options: Shared
    times: int

    def results(self):
        return {"y": Empty((self.x.shape[0], self.x.shape[0]), self.x.dtype)}


def sum_of_products(p: Plan, call: Summed):
    y = p.new(call.results()["y"])
    right = p.view(call.x, call.x.shape[::-1], call.x.strides[::-1])
    p.torch(torch.Tensor.zero_, y, writes=[y])
    for _ in range(call.times):
        p.torch(add_product, y, call.x, right, call.options.factor, writes=[y])
    return (y,)


def add_product(y, left, right, factor):
    y += factor * (left @ right)


SUM = Operator(LIBRARY, "summed", Summed, ["y"], plan=sum_of_products)


def test_options_of_several_records_stand_side_by_side():
    assert SUM.signature.schema == "summed(Tensor x, float factor, int? limit, ScalarType? dtype, int times) -> (Tensor y)"
    call = Summed(torch.ones(2, 3), Shared(1, 4), 5)
    assert SUM.signature.arguments(call) == (call.x, 1, 4, None, 5)
    made = SUM.signature.call(SUM.signature.arguments(call))
    assert made.options == Shared(1.0, 4) and type(made.options.factor) is float
    torch.library.opcheck(torch.ops.npu_tiling_test_steps.summed.default, SUM.signature.arguments(call))


@pytest.mark.parametrize("times", [1, 200], ids=["a function", "step by step"])
def test_without_a_reference_the_plan_serves_where_there_is_no_chip(times):
    SUM._functions.clear()
    SUM._plans.clear()
    x = torch.rand(2, 3)
    for _ in range(4):
        y = SUM(Summed(x, Shared(2.0), times))
        torch.testing.assert_close(y, 2.0 * times * (x @ x.t()), rtol=1e-4, atol=0.0)
    assert bool(SUM._functions) == (times == 1)


def test_autocast_casts_nothing_that_a_plan_computes():
    x = torch.rand(2, 3)
    for _ in range(3):
        expected = SUM(Summed(x, Shared(), 1))
    for fresh in (False, True):
        if fresh:
            SUM._functions.clear()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(SUM(Summed(x, Shared(), 1)), expected)


def product_of_rows(call: Summed):
    return call.options.factor * (call.x @ call.x.t())


def plan_of_product(p: Plan, call: Summed):
    return [p.torch(product_of_rows, call, makes=call.results()["y"])]


STEP = Operator(LIBRARY, "step_of_a_record", Summed, ["y"], plan=plan_of_product)
DEFINITION = Operator(
    LIBRARY, "definition", Summed, ["y"], plan=plan_of_product, reference=lambda call: [product_of_rows(call)]
)


@pytest.mark.parametrize("operator", [STEP, DEFINITION], ids=["a step of a plan", "the reference"])
def test_a_function_of_a_record_computes_in_its_dtypes(operator):
    call = Summed(torch.rand(2, 3), Shared(3.0), 1)
    for _ in range(4):  # by steps, then as a function
        assert torch.equal(operator(call), product_of_rows(call))
    assert bool(operator._functions) == (operator is STEP)
    expected = operator(call)
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(operator(call), expected)
        operator._functions.clear()


def helped(p, x):
    return p.torch(torch.neg, x, makes=Empty(x.shape, x.dtype))


def test_steps_are_those_of_the_caller_of_a_module_that_says_so(monkeypatch):
    plan = Plan(npu_tiling.GPUS["H200"])
    x = plan.argument(torch.ones(3))
    exec("PLANS_FOR_CALLERS = True\ndef add(p, x, how): return p.torch(how, x)", scope := {})
    scope["add"](plan, x, torch.neg)
    assert plan.steps[-1].origin.function == "test_steps_are_those_of_the_caller_of_a_module_that_says_so"


def test_steps_run_once():
    assert torch.equal(run_once(lambda p, x: (helped(p, x),), None, torch.ones(3))[0], -torch.ones(3))


def test_a_call_with_shared_options_is_traced():
    x = torch.ones(2, 3)
    compiled = torch.compile(lambda x: SUM(Summed(x, Shared(), 1)), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), SUM(Summed(x, Shared(), 1)))
