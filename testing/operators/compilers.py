"""The public functions under torch.compile and torch.export."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._dynamo.testing
from torch._dynamo import compiled_autograd
from torch.utils._pytree import tree_map

from .case import DEVICES, Case, asked, close, dense, of_function, of_gradient, only_at

if TYPE_CHECKING:
    from npu_offline.plugin import Place


@only_at(*DEVICES)
@asked(of_function)
def test_compiles_to_one_graph_for_any_number_of_tokens(npu_place: Place, case: Case) -> None:
    """Between other operators, with gradients."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor" if npu_place.name == "cuda" else "aot_eager")
    dims = case.token_dims()

    def layer(*tensors: Any) -> Any:
        found = case.function(*(torch.sin(one) if one.requires_grad else one for one in tensors))
        return tree_map(lambda one: one * 2 if isinstance(one, torch.Tensor) else one, found)

    def results(function: Any, tokens: int) -> list[torch.Tensor]:
        call = case.draw(npu_place.torch, tokens)
        leaves = call.leaves()
        for tensor, dim in zip(call.given(leaves), dims, strict=True):
            if dim is not None:
                torch._dynamo.mark_dynamic(tensor, dim)
        return call.results(function, leaves)

    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for tokens in (3, 17) if any(dim is not None for dim in dims) else (3,):
        close(results(compiled, tokens), results(layer, tokens))
    assert counter.frame_count == 1


@only_at("cpu")
@asked(of_gradient)
def test_a_backward_is_compiled_by_itself(npu_place: Place, case: Case) -> None:
    """Of a call that was not compiled, as compiled autograd does."""
    call = case.draw(npu_place.torch)
    leaves = call.leaves()
    value, expected = call.scalar(*leaves), call.gradients(call.leaves())
    with compiled_autograd._enable(torch.compile(backend="aot_eager")):
        value.backward()
    close([dense(leaf.grad) for leaf in leaves if leaf.grad is not None], expected)


@asked(of_gradient)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.:DeprecationWarning")
def test_a_trace_has_the_operator_and_its_gradient(npu_place: Place, case: Case) -> None:
    """torch.jit.trace, which runs the call without gradients too, and compares."""
    call = case.draw(npu_place.torch)
    trained = call.leaves()
    traced = torch.jit.trace(lambda *given: tuple(call.outputs(*given)), tuple(trained))
    assert " = npu_" in str(traced.graph)
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    for each in (traced, torch.jit.load(file)):
        close(call.results(lambda *given, each=each: each(*(given[at] for at in call.places))), call.results())


@only_at(*DEVICES)
@asked(of_function)
def test_exported_programs_can_be_saved(npu_place: Place, case: Case) -> None:
    """With any number of tokens; results are tuples of the same type."""

    class Model(torch.nn.Module):
        def forward(self, *tensors: Any) -> Any:
            return case.function(*tensors)

    dims = tuple(None if dim is None else {dim: torch.export.Dim.DYNAMIC} for dim in case.token_dims())
    program = torch.export.export(Model(), tuple(case.draw(npu_place.torch).tensors), dynamic_shapes=(dims,), strict=False)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for made in (program, torch.export.load(file)):
        for n in (3, 5):
            given = case.draw(npu_place.torch, n)
            found, expected = made.module()(*given.tensors), case.draw(npu_place.torch, n)
            assert type(found) is type(case.function(*expected.tensors))
            close(given.outputs(*given.trained, function=lambda *_, found=found: found), expected.outputs(*expected.trained))
