"""Patched models of Hugging Face transformers under torch.compile: one graph, one compilation, the same training step."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from causal_lms import FAMILIES, assert_same, batch, make, patch_all, step

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

# Two that differ in most: norm before or also after a layer, softcaps, tied tables. The others compile every night.
ALWAYS = {"Llama", "Gemma2"}


@pytest.fixture(autouse=True)
def _forget_compiled():
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.nightly) for name in FAMILIES]
)
def test_compiles_once_for_any_number_of_tokens(family):
    model = make(family)
    patch_all(model)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for tokens in (12, 9):
        inputs = batch(tokens)
        for tensor in inputs.values():
            torch._dynamo.mark_dynamic(tensor, 1)
        assert_same(step(model, inputs, compiled), step(model, inputs))
    assert counter.frame_count == 1


@pytest.mark.nightly
@pytest.mark.parametrize("dynamic", [True, None])
def test_compiles_where_pytorch_chooses_what_varies(dynamic):
    model = make("Llama")
    patch_all(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for tokens in (12, 9):
        assert_same(step(model, batch(tokens), compiled), step(model, batch(tokens)))


@pytest.mark.nightly
def test_inductor_trains_the_same():
    model, inputs = make("Llama"), batch()
    patch_all(model)
    compiled = torch.compile(model, fullgraph=True)
    assert_same(step(model, inputs, compiled), step(model, inputs))
