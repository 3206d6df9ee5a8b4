"""The operators that cases call, as PyTorch has them registered: schemas, fake functions, autograd, traces."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from .case import DEVICES, Case, asked, of_function, only_at, record

if TYPE_CHECKING:
    from npu_offline.plugin import Place

_BRIEF = ("test_schema", "test_faketensor")  # which execute an operator, and trace nothing


@only_at(*DEVICES)
@asked()
def test_operators_are_registered_properly(npu_place: Place, npu_opcheck: Any, case: Case) -> None:
    check = functools.partial(torch.library.opcheck, test_utils=_BRIEF)
    for called in record(case):
        (check if case.option else npu_opcheck)(called.operator, called.on(npu_place.torch))


@pytest.mark.few(4)
@asked()
def test_results_lie_as_the_compiler_is_told(npu_place: Place, case: Case) -> None:
    """Of 16-bit inputs and upstream gradients whose dimensions lie in memory in another order, and of no tokens."""
    check = functools.partial(torch.library.opcheck, test_utils=_BRIEF)
    for called in (*record(case, dtype=torch.bfloat16, strided=True), *record(case, tokens=0)):
        check(called.operator, called.on(npu_place.torch))


@only_at("cpu")
@asked(of_function)
def test_tensors_without_data_have_the_same_shapes(npu_place: Place, case: Case) -> None:
    without = [_described(result) for result in case.draw("meta", dtype=torch.bfloat16).results()]
    assert without == [_described(result) for result in case.draw(dtype=torch.bfloat16).results()]


@asked()
def test_every_operator_is_called_by_a_case(request: pytest.FixtureRequest) -> None:
    """So that what the suite asks is asked of all; OTHERS are tested elsewhere."""
    module = request.module
    namespace = module.OPS.name
    schemas = [schema.name.partition("::") for schema in torch._C._jit_get_all_schemas()]
    known = {name for of, _, name in schemas if of == namespace}
    called = {each.operator._opname for case in module.CASES for each in record(case)}
    assert called == known - getattr(module, "OTHERS", frozenset())


def _described(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()
