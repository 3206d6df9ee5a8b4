"""What public functions refuse: with one sentence, which names the argument, what it was and what it must be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
from torch import Tensor

from .case import Case, asked, of_function, only_at, tensors_of

if TYPE_CHECKING:
    from npu_offline.plugin import Place


class Refusal(NamedTuple):
    """A call that raises an error, and its sentence, as `re.search` finds it."""

    name: str
    error: type[Exception]
    call: Callable[[], object]


class Wide(NamedTuple):
    """A function of tensors, and the name of the one whose dtype it refuses."""

    name: str
    function: Callable[..., object]
    tensors: tuple[Tensor, ...]


def refusals(table: Mapping[type[Exception], Mapping[str, Callable[[], object]]]) -> Iterator[Refusal]:
    """Of each error the sentences, and the calls that raise it."""
    for error, calls in table.items():
        for sentence, call in calls.items():
            yield Refusal(sentence, error, call)


@asked(table="REFUSED", rows=refusals)
def test_refused(case: Refusal) -> None:
    with pytest.raises(case.error, match=case.name):
        case.call()


@only_at("cpu")
@asked(of_function)
@pytest.mark.parametrize("kind", ["nested", "sparse"])
def test_a_tensor_that_is_not_dense_is_refused(npu_place: Place, case: Case, kind: str) -> None:
    given = case.draw().tensors
    for at, tensor in enumerate(given):
        other = torch.nested.nested_tensor([tensor, tensor]) if kind == "nested" else tensor.to_sparse()
        with pytest.raises(TypeError, match=f" is .*{kind}.* and must be a dense tensor"):
            case.function(*given[:at], other, *given[at + 1 :])


@asked(table="WIDE")
def test_fp64_is_for_the_cpu_alone(npu_place: Place, case: Wide) -> None:
    wide = [tensor.double() if tensor.is_floating_point() else tensor for tensor in case.tensors]
    given = [tensor.to(npu_place.torch) for tensor in wide]  # torch_npu's own conversion makes fp32 of it
    if npu_place.name == "cpu":
        assert tensors_of(case.function(*given))[0].dtype == torch.float64
    else:
        with pytest.raises(TypeError, match=f"^{case.name} is torch.float64"):
            case.function(*given)
