"""N-gram embeddings of transformers' Qwen4-Exp: the same rows and gradients, bit for bit, with and without its cache."""

import copy
from types import SimpleNamespace

import pytest
import torch
from npu_embedding import NGramEmbedding, patch

modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp", reason="a transformers without Qwen4-Exp")
EOS = 7
CONFIG = {
    "ngram_size": 3,
    "heads_per_ngram": 4,
    "vocab_size": 5000,
    "ngram_vocab_size_base": 1000,
    "seed": 1234,
    "eos_token_id": [EOS],
    "make_ngram_vocab_size_divisible_by": 128,
}


@pytest.fixture
def known():
    torch.manual_seed(0)
    return modeling.Qwen4ExpTextNGramEmbedding(SimpleNamespace(**CONFIG), 128, 0, 1)


class Cache:
    """The ids of a layer, as transformers' own cache keeps them."""

    def __init__(self):
        self.ids = None

    def get_conv_state(self, layer_idx, state_idx):
        return self.ids

    def update_conv_state(self, ids, layer_idx, state_idx, conv_kernel_size):
        joined = ids if self.ids is None else torch.cat((self.ids, ids), 1)
        self.ids = joined[:, -conv_kernel_size:]


class RecordingCache(Cache):
    """Keeps all ids, as transformers' cache does while it records."""

    def update_conv_state(self, ids, layer_idx, state_idx, conv_kernel_size):
        self.ids = ids if self.ids is None else torch.cat((self.ids, ids), 1)


def texts(shape=(3, 40)):
    ids = torch.randint(0, 5000, shape, generator=torch.Generator().manual_seed(0))
    ids[:, ::6] = EOS
    return ids


def results(module, ids, cache=None):
    module.zero_grad()
    parts = [module(part, cache) for part in (ids.split([1, 1, 7, 31], 1) if cache else [ids])]
    out = torch.cat(parts, 1)
    out.square().sum().backward()
    return out.detach(), module.ngram_embedding.weight.grad.clone()


def test_module_is_the_class_of_transformers(known):
    ours = NGramEmbedding(5000, 128, EOS, heads_per_ngram=4, table_size=1000, layer_index=1)
    for name, tensor in ours.state_dict().items():
        assert name == "ngram_embedding.weight" or torch.equal(tensor, known.state_dict()[name]), name
    ours.load_state_dict(known.state_dict())
    for mine, theirs in zip(results(ours, texts()), results(known, texts()), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.few(2)
@pytest.mark.parametrize("cache", [None, Cache, RecordingCache])
@pytest.mark.parametrize("emulated", [False, pytest.param(True, marks=pytest.mark.compilers)])
def test_patched_class_finds_the_same_rows(known, cache, emulated):
    if emulated:
        npu_offline = pytest.importorskip("npu_offline")
        if not npu_offline.installed():
            pytest.skip("needs a toolchain (npu-offline fetch)")
    twin = copy.deepcopy(known)
    assert [(entry.was, entry.by if hasattr(entry, "by") else entry.text) for entry in patch(twin).replaced][0] == (
        "Qwen4ExpTextNGramEmbedding",
        "ngram_embedding",
    )
    expected = results(known, texts(), cache and cache())
    if not emulated:
        found = results(twin, texts(), cache and cache())
    else:
        with npu_offline.emulate("Ascend910B4"):
            found = results(twin, texts(), cache and cache())
    assert torch.equal(found[0], expected[0])
    assert torch.allclose(found[1], expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", ["hook", "backward hook", "max_norm", "sparse"])
def test_hooks_and_options_of_the_table_are_kept(known, what, when):
    twin = copy.deepcopy(known)
    if when == "after":
        patch(twin)
    for each in (known, twin):
        table = each.ngram_embedding
        if what == "hook":
            table.register_forward_hook(lambda module, given, rows: rows * 2)
        elif what == "backward hook":
            table.register_full_backward_hook(lambda module, dx, dy: None)
        else:
            setattr(table, what, {"max_norm": 0.5, "sparse": True}[what])
    if when == "before":
        patch(twin)
    expected, found = results(known, texts()), results(twin, texts())
    assert torch.allclose(found[0], expected[0], rtol=1e-5, atol=1e-6) and found[1].is_sparse == expected[1].is_sparse
    assert torch.allclose(found[1].to_dense(), expected[1].to_dense(), rtol=1e-5, atol=1e-5)


def test_offloaded_tables_are_left_alone(known):
    known.ngram_embedding._hf_hook = object()
    assert {entry.text for entry in patch(known).left} == {"accelerate moves its parameters"}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantised_tables_are_left_alone(known, dtype):
    known.ngram_embedding.weight = torch.nn.Parameter(known.ngram_embedding.weight.detach().to(dtype), requires_grad=False)
    report = patch(known)
    assert not report.replaced
    assert str(dtype).removeprefix("torch.") in report.left[0].text
