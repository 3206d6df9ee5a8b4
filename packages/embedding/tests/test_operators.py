"""Embeddings as PyTorch sees them: the questions of testing/operators, and what is this package's alone."""

from functools import partial

import lookup
import pytest
import torch
from npu_embedding import Embedding, EmbeddingBag, embedding, embedding_bag, ngram_embedding
from npu_embedding.rows import Way
from torch.nn import functional

from testing.operators import *  # noqa: F403
from testing.operators import Case, Input, integers, only_at

OPS = torch.ops.npu_embedding
SHARDED_AT = ("cpu", "cuda")  # sharding_worker.py
OTHERS = {"by_all", "by_all_backward"}  # of a process group: sharding_worker.py
MODULES = {
    kind: kind(10, 8, padding_idx=1, max_norm=max_norm) for kind, max_norm in ((Embedding, None), (EmbeddingBag, 1.0))
}
INT8 = partial(torch.Tensor.char)


def ids(n):
    return integers(10, n, 2), (10, 8)


def texts(n):
    return integers(100, n, 5), (12, 8)


def ids_of_bags(n):
    return integers(10, 3 * n), (10, 8), 3 * torch.arange(n), (3 * n,)


def of_a_shard(indices, weight):
    inside = (indices >= 1) & (indices < 9)
    return functional.embedding(torch.where(inside, indices - 1, 0), weight) * inside.unsqueeze(-1)


def clipped(function, **options):
    """With a table of its own, which is written to."""
    return lambda indices, weight: function(indices, weight.clone(), **options)


def concatenated(indices, weight):
    return functional.embedding(indices, weight).flatten(1)


def computed(indices, weight):
    return functional.rms_norm(2.5 * functional.embedding(indices, weight), (8,), eps=1e-3)


def weighted_bags(indices, weight, offsets, scales, function=embedding_bag):
    return function(indices, weight, offsets, mode="sum", per_sample_weights=scales)


def weighted_sums(indices, weight, offsets, scales):
    return (functional.embedding(indices, weight) * scales.unsqueeze(-1)).view(-1, 3, 8).sum(1)


def ngrams(ids, table, **options):
    multipliers = [31, 17, 5]
    return ngram_embedding(ids, table, multipliers, [5, 7], [0, 5], 0, 3, **options)


def of_module(kind):
    return lambda indices, weight: torch.func.functional_call(MODULES[kind], {"weight": weight.clone()}, (indices,))


# Questions without an answer: PyTorch's own function has no second derivative there, and vmap does not write to tables.
DERIVATIVES = frozenset({"test_forward_mode_is_that_of_the_definition"})
WRITES = frozenset({"test_vmap_gives_what_each_call_does"})
DENSE = WRITES | {
    "test_several_upstream_gradients_give_what_each_does",
    "test_tensors_without_data_have_the_same_shapes",
}
LISTS = frozenset({"test_nothing_waits_for_the_device", "test_graph_capture"})  # are copied to the device in each call
OF_TORCH = frozenset({"test_a_tensor_that_is_not_dense_is_refused"})  # for which torch's forward runs
INDUCTOR = frozenset({"test_compiles_to_one_graph_for_any_number_of_tokens", "test_graph_capture"})  # no sparse gradients
STATELESS = frozenset({"test_a_trace_has_the_operator_and_its_gradient"})  # torch.func.functional_call is not traced
CASES = (
    Case("embedding", embedding, ids, functional.embedding, saved=(6,)),
    Case("a padding row", partial(embedding, padding_idx=2), ids, partial(functional.embedding, padding_idx=2), option=True),
    Case(
        "by frequency",
        partial(embedding, padding_idx=2, scale_grad_by_freq=True),
        ids,
        partial(functional.embedding, padding_idx=2, scale_grad_by_freq=True),
        saved=(6,),
        option=True,
        without=DERIVATIVES,
    ),
    Case(
        "a shard",
        partial(embedding, vocab_range=(1, 9), num_embeddings=10),
        lambda n: (integers(10, n, 2), (8, 8)),
        of_a_shard,
        option=True,
    ),
    Case("sparse", partial(embedding, sparse=True), ids, functional.embedding, without=DERIVATIVES | DENSE | INDUCTOR),
    Case("max_norm", clipped(embedding, max_norm=1.0), ids, clipped(functional.embedding, max_norm=1.0), without=WRITES),
    Case("computed rows", partial(embedding, multiplier=2.5, rms_norm_eps=1e-3), ids, computed, tangents=False),
    Case(
        "rows of 8 bits",
        lambda indices, weight, scales: embedding(indices, weight, row_scales=scales),
        lambda n: (integers(10, n, 2), Input((10, 8), 100, of=INT8), Input((10,), dtype=torch.float32)),
    ),
    Case("embedding_bag", embedding_bag, ids, functional.embedding_bag, tangents=False),
    Case("bags between offsets", weighted_bags, ids_of_bags, weighted_sums, tangents=False),
    Case("concat", partial(embedding_bag, mode="concat"), ids, concatenated, option=True),
    Case("ngram_embedding", ngrams, texts, tangents=False, without=LISTS),
    Case("sums of n-grams", partial(ngrams, mode="sum"), texts, tangents=False, option=True, without=LISTS),
    Case("Embedding", of_module(Embedding), ids, without=DERIVATIVES | OF_TORCH | STATELESS),
    Case("EmbeddingBag", of_module(EmbeddingBag), ids, tangents=False, without=WRITES | STATELESS),
)
BATCHES = tuple(
    Case(f"{width}", embedding, lambda n, w=width: (integers(300, n), (300, w)), dtype=dtype, tokens=131)
    for width, dtype in ((64, torch.bfloat16), (100, torch.float32), (1000, torch.float16))
)


@only_at("cuda")
@pytest.mark.parametrize("way", [Way.SEARCHED, Way.REPEATED, Way.RANKED, Way.SORTED])
@pytest.mark.parametrize("width", [64, 100, 4096])
def test_graph_capture_of_each_sort(device, width, way, monkeypatch, npu_capture):
    lookup.take(way, monkeypatch.setattr)
    indices, other = torch.randint(0, 500, (2, 300), device=device.torch)
    weight = torch.randn(500, width, device=device.torch, requires_grad=True)
    dy = torch.randn(300, width, device=device.torch)
    step = lambda: (lambda y: (y, *torch.autograd.grad(y, weight, dy)))(embedding(indices, weight))  # noqa: E731
    captured, replay = npu_capture(step)
    indices.copy_(other)
    replay()
    for replayed, eager in zip(captured, step(), strict=True):
        assert torch.equal(replayed, eager)


@only_at("cuda")
@pytest.mark.parametrize("kind", lookup.KINDS)
def test_both_sorts_end_in_the_same_gradient(device, kind, monkeypatch):
    """On CUDA our kernels sort a few thousand indices, and torch.sort sorts more."""
    case = lookup.make(5000, 5000, 768, torch.bfloat16, kind, padding_idx=3)
    ranked = lookup.run(case, device.torch)
    lookup.check(case, ranked)
    lookup.take(Way.SORTED, monkeypatch.setattr)
    assert torch.equal(lookup.run(case, device.torch)[1], ranked[1])


def test_max_norm_has_the_derivative_of_pytorchs():
    tables = [torch.arange(40.0).view(5, 8).cos() for _ in range(2)]
    indices, tangent = torch.tensor([1, 2, 2, 4]), torch.arange(40.0).view(5, 8).sin()
    results = [
        torch.func.jvp(lambda w, look_up=look_up: look_up(indices, w, max_norm=1.0), (table,), (tangent,))
        for look_up, table in zip((embedding, functional.embedding), tables, strict=True)
    ]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*tables)


def test_tangents_of_sparse_gradients_are_refused_by_name():
    weight = torch.arange(40.0).view(5, 8).cos()
    loss = lambda w: embedding(torch.tensor([4, 0, 2, 2]), w, sparse=True).square().sum()  # noqa: E731
    with pytest.raises(NotImplementedError, match="npu_embedding::backward has no forward-mode"):
        torch.func.jvp(torch.func.grad(loss), (weight,), (weight,))
