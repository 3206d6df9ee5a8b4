"""What `explain` says of a call is what the call launches, wherever there are kernels."""

import lookup
import pytest
import torch
from npu_embedding import embedding, embedding_bag, explain
from npu_embedding.rows import Way

from testing.operators import *  # noqa: F403

EXPLAINED = {
    "few indices": {"tokens": 100, "vocabulary": 300, "width": 512},
    "several groups": {"tokens": 2500, "vocabulary": 300, "width": 64},
    "by frequency": {"tokens": 700, "vocabulary": 300, "width": 100, "scale_grad_by_freq": True},
    "sparse": {"tokens": 300, "vocabulary": 300, "width": 64, "sparse": True},
    "columns of a wider table": {"tokens": 300, "vocabulary": 40, "width": 123, "pitch": 200},
    "columns": {"tokens": 24, "vocabulary": 40, "width": 40000},
    "bags": {"tokens": 96, "vocabulary": 300, "width": 64, "bag": 4, "mode": "sum", "per_sample_weights": True},
    "uneven bags": {"tokens": 96, "vocabulary": 300, "width": 64, "bags": 7, "mode": "sum", "per_sample_weights": True},
    "padding and a factor": {"tokens": 300, "vocabulary": 300, "width": 64, "padding_idx": 5, "multiplier": 8.0},
}


def run(place, tokens, vocabulary, width, pitch=None, bag=None, bags=None, per_sample_weights=False, **options):
    """The call that `explain` has these options for."""
    table = torch.ones(vocabulary, pitch or width, dtype=torch.bfloat16)[:, :width]
    weight = lookup.leaf(table, place.torch) if pitch is None else table.to(place.torch).requires_grad_()
    indices, leaves = lookup.draw("zipf", tokens, vocabulary).to(place.torch), [weight]
    if bag is None and bags is None:
        out = embedding(indices, weight, **options)
    else:
        shape = (tokens,) if bag is None else (tokens // bag, bag)
        leaves.append(torch.ones(shape, dtype=torch.bfloat16, device=place.torch, requires_grad=True))
        starts = None if bags is None else torch.arange(bags, device=place.torch) * 2
        out = embedding_bag(indices.view(shape), weight, starts, per_sample_weights=leaves[1], **options)
    torch.autograd.grad(out, leaves, torch.ones_like(out))


def test_every_launch_says_what_decided_it():
    for chip in ("Ascend910B4", "H200"):
        for call in EXPLAINED.values():
            for launch in explain(**call, chip=chip, backward=True).launches:
                assert launch.why and launch.decided_at.startswith("npu_embedding/"), launch.kernel


@pytest.mark.parametrize(("tokens", "launches"), [(1, 1), (1024, 1), (1025, 4), (16384, 4), (16385, 5), (131072, 5)])
def test_the_gradient_of_few_indices_is_one_launch_on_cuda(tokens, launches):
    found = explain(tokens=tokens, vocabulary=300, width=64, chip="H200", backward=True)
    kernels = [launch.kernel for launch in found.launches if launch.direction == "backward"]
    assert len(kernels) == launches and (kernels == ["sum_searched_kernel"]) == (tokens <= 1024)
    assert not found.calls


@pytest.mark.parametrize(
    ("vocabulary", "options", "way"),
    [(300, {}, Way.REPEATED), (4000, {}, Way.RANKED), (300, {"bag": 4, "mode": "sum"}, Way.RANKED)],
)
def test_the_launches_that_sort_name_the_way_that_runs(vocabulary, options, way):
    found = explain(tokens=2500, vocabulary=vocabulary, width=64, chip="H200", backward=True, **options)
    sorts = [each for each in found.launches if each.kernel in ("sort_groups_kernel", "rank_runs_kernel")]
    assert {each.way for each in sorts} == {str(way)}
    sums = "sum_bags_kernel" if way is Way.REPEATED else "sum_sorted_kernel"
    assert sums in [each.kernel for each in found.launches if each.direction == "backward"]


def test_pytorchs_sort_stands_between_the_launches():
    found = explain(tokens=131073, vocabulary=300, width=64, chip="H200", backward=True)
    steps = [getattr(step, "kernel", None) or step.name for step in found.steps if step.direction == "backward"]
    assert steps == ["zeros", "mark_rows_kernel", "sort", "sum_sorted_kernel", "add_partials_kernel"]


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(("tokens", "merges"), [(2048, 0), (2049, 1), (8193, 2), (131072, 3), (131073, 3), (2**30, 3)])
def test_a_gradient_on_ascend_is_at_most_six_launches_and_a_sparse_one_a_launch_more(tokens, merges, sparse):
    found = explain(tokens=tokens, vocabulary=300, width=64, chip="Ascend910B4", backward=True, sparse=sparse)
    kernels = [launch.kernel for launch in found.launches if launch.direction == "backward"]
    sort = ["sort_runs_kernel", *["merge_runs_kernel"] * merges]
    assert kernels == [*sort, *["find_slots_kernel"] * sparse, "sum_rows_kernel", "add_partials_kernel"]
    assert not found.calls


def test_the_mode_is_of_bags_and_of_ngrams():
    call = {"tokens": 8, "vocabulary": 10, "width": 64, "chip": "H200", "backward": True}
    concat, added = (explain(**call, ngram_size=3, heads=4, **mode) for mode in ({}, {"mode": "sum"}))
    assert [found.launches[0].flags["CONCAT"] for found in (concat, added)] == [True, False]
    assert str(explain(**call, bag=2)) == str(explain(**call, bag=2, mode="mean"))
    with pytest.raises(ValueError, match="mode is 'sum' and must be left out where neither bags nor ngram_size are given"):
        explain(**call, mode="sum")
    with pytest.raises(ValueError, match="mode is 'mean' and must be one of 'concat', 'sum'"):
        explain(**call, ngram_size=3, mode="mean")


def test_a_call_of_any_size_needs_no_memory():
    found = explain(tokens=2**33, vocabulary=2**28, width=2**14, chip="B200", backward=True)
    assert [launch.kernel for launch in found.launches if launch.way][0] == "mark_rows_kernel"


NGRAMS = {"tokens": 8, "vocabulary": 10, "width": 64, "chip": "H200", "ngram_size": 3, "heads": 4}
BYTES = {
    # Forward n rows read and n written; backward n read and V written.
    "rows": (
        {"tokens": 1000, "vocabulary": 300, "width": 512, "chip": "Ascend910B4", "backward": True},
        {"forward": 8 * 1000 + 2 * 2 * 1000 * 512, "backward": 8 * 1000 + 2 * (1000 + 300) * 512},
    ),
    # Ids, rows read, and what is written: 4 rows of 64 a token, or their sum.
    "ngrams": (NGRAMS, {"forward": 8 * 8 + 2 * 8 * (4 + 4) * 64}),
    "sums of ngrams": ({**NGRAMS, "mode": "sum"}, {"forward": 8 * 8 + 2 * 8 * (4 + 1) * 64}),
}
