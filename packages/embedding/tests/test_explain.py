"""What `explain` says of a call is what the call launches, wherever there are kernels."""

import lookup
import npu_tiling
import pytest
import torch
from npu_embedding import embedding, explain
from npu_tiling.explaining.explanation import explained

CALLS = {
    "few indices": {"tokens": 100, "vocabulary": 300, "width": 512},
    "several groups": {"tokens": 2500, "vocabulary": 300, "width": 64},
    "by frequency": {"tokens": 700, "vocabulary": 300, "width": 100, "scale_grad_by_freq": True},
    "sparse": {"tokens": 300, "vocabulary": 300, "width": 64, "sparse": True},
    "columns of a wider table": {"tokens": 300, "vocabulary": 40, "width": 123, "pitch": 200},
    "columns": {"tokens": 24, "vocabulary": 40, "width": 40000},
}


def run(place, tokens, vocabulary, width, pitch=None, **options):
    """The call that `explain` has these options for."""
    table = torch.ones(vocabulary, pitch or width, dtype=torch.bfloat16)[:, :width]
    weight = lookup.leaf(table, place.torch) if pitch is None else table.to(place.torch).requires_grad_()
    out = embedding(lookup.draw("zipf", tokens, vocabulary).to(place.torch), weight, **options)
    torch.autograd.grad(out, weight, torch.ones_like(out))


@pytest.mark.parametrize("call", CALLS)
def test_explained_launches_are_those_that_are_made(device, call):
    chip = npu_tiling.device_for(device.torch)
    if chip is None:
        pytest.skip("plain PyTorch launches none of our kernels")
    with npu_tiling.watch_launches() as launches:
        run(device, **CALLS[call])
    found = explain(**CALLS[call], dtype="bf16", chip=chip, backward=True).launches
    assert found == explained(launches)
    assert {launch.direction for launch in found} == {"forward", "backward"}


def test_every_launch_says_what_decided_it():
    for chip in ("Ascend910B4", "H200"):
        for call in CALLS.values():
            for launch in explain(**call, chip=chip, backward=True).launches:
                assert launch.why and launch.decided_at.startswith("npu_embedding/"), launch.kernel


def test_the_sort_stands_between_the_launches():
    text = explain(tokens=65537, vocabulary=300, width=64, chip="Ascend910B4", backward=True).text
    places = [
        text.index(step) for step in ("make_keys_kernel", "2. PyTorch's sort of 65537 fp32 numbers", "sum_rows_kernel")
    ]
    assert places == sorted(places) and "3 launches and 1 sort" in text
    text = explain(tokens=65536, vocabulary=300, width=64, chip="Ascend910B4", backward=True).text
    assert "6 launches" in text and "PyTorch's sort" not in text


def test_bytes_are_those_of_the_formula():
    """Forward n rows read and n written; backward n read and V written."""
    found = explain(tokens=1000, vocabulary=300, width=512, chip="Ascend910B4", backward=True).bytes_moved
    assert found == {"forward": 8 * 1000 + 2 * 2 * 1000 * 512, "backward": 8 * 1000 + 2 * (1000 + 300) * 512}


def test_a_call_of_any_size_needs_no_memory():
    found = explain(tokens=2**33, vocabulary=2**28, width=2**14, chip="B200", backward=True)
    assert [launch.kernel for launch in found.launches if launch.way][0] == "mark_rows_kernel"
