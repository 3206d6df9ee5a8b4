"""Sorted indices and the slots of a sparse gradient, emulated: every order of indices, between guard values."""

from functools import partial

import lookup
import npu_offline
import pytest
import torch
from npu_embedding import reference
from npu_embedding.lookup import ascend_sort
from npu_embedding.lookup.ascend import slots
from npu_embedding.lookup.ascend_sort import KEY_OF_ROW_0, WAYS, sorted_keys
from npu_tiling import plans, soc

from testing.memory import guarded

REASON = "needs triton-ascend (npu-offline fetch)"
pytestmark = [pytest.mark.compilers, pytest.mark.skipif(not npu_offline.installed(), reason=REASON)]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("n", [30, 5000, 20000])
def test_indices_are_sorted_by_row_and_place(n, dtype):
    """Of a shard far along a table, past rows that 32 bits name; what lies outside it comes last."""
    ends, first, rows = torch.iinfo(dtype), 2**30, 2**31 - 2**24 - 3
    edges = [first, first + 1, ends.max, ends.min, 0, -1, first - 1, first + 7]
    edges += [2**32 + first, first + rows, first + rows - 1] if dtype == torch.int64 else []
    last = min(first + rows, ends.max)
    generator = torch.Generator().manual_seed(0)
    spread = torch.randint(first - 5, last, (n // 2,), generator=generator)
    near = torch.randint(first - 5, first + 60, (n // 2,), generator=generator)
    indices = torch.cat((torch.tensor(edges), spread, near)).to(dtype)
    with npu_offline.emulate("Ascend910B4"):
        keys, order = lookup.planned(partial(sorted_keys, rule=WAYS[0]), soc("Ascend910B4"), indices, rows, 9, False, first)
    row = indices.long() - first
    named = torch.where((row >= 0) & (row < rows) & (row != 9), row, rows)
    expected, places = named.sort(stable=True)
    assert torch.equal(keys.long() - KEY_OF_ROW_0, expected)
    assert torch.equal(order.long(), places)
    # Neither zero nor below the smallest normal number, which sorts may take for zero, nor infinite.
    numbers = keys.view(torch.float32)
    assert (numbers >= torch.finfo(torch.float32).smallest_normal).all() and numbers.isfinite().all()


@pytest.mark.parametrize("kind", ["uniform", "zipf", "equal", "two", "ascending", "descending", "alternating", "padded"])
@pytest.mark.parametrize(
    ("n", "most_runs", "launches"),
    [
        pytest.param(8192, 64, 2, id="a set of four runs"),
        pytest.param(8193, 64, 3, id="several sets, the last of fewer"),
        pytest.param(139999, 64, 4, id="a program sorts two blocks"),
        pytest.param(59999, 3, 2, id="a program sorts ten blocks in two rounds"),
    ],
)
def test_runs_are_merged_whatever_the_indices_are(n, most_runs, launches, kind, monkeypatch):
    """Between guard values."""
    checks, rows, padding = [], n, 0 if kind == "padded" else -1
    place = torch.arange(n)
    indices = {
        "two": place % 2 * (n - 1),
        "ascending": place,
        "descending": n - 1 - place,
        "alternating": place // 2 * (place % 2 * 2 - 1) + n // 2,  # from the middle of the table to both ends
        "padded": torch.where(place % 3 == 0, 0, place % 7 * n // 5),  # the padding row, and rows outside the table
    }.get(kind)
    indices = lookup.draw(kind, n, 30000) if indices is None else indices

    def guarding(shape, strides, dtype, device):
        tensor, check = guarded(shape, dtype, device)
        checks.append(check)
        return tensor

    monkeypatch.setattr(plans, "empty_strided", guarding)
    monkeypatch.setattr(ascend_sort, "_MAX_RUNS", most_runs)
    with npu_offline.emulate("Ascend910B4", races=True, shuffle=1) as emulation:
        keys, order = lookup.planned(
            partial(sorted_keys, rule=WAYS[0]), soc("Ascend910B4"), indices, rows, padding, False, 0
        )
    expected, places = torch.where((indices < rows) & (indices != padding), indices, rows).sort(stable=True)
    assert torch.equal(keys.long() - KEY_OF_ROW_0, expected)
    assert torch.equal(order.long(), places)
    assert len(emulation.launches) == launches
    for check in checks:
        check()


SLOTS = {  # indices, rows of the table, the padding row, and the first row of the shard
    "some outside": (torch.arange(5000) * 7919 % 70 - 3, 60, 7, 0),
    "equal over several tiles": (torch.full((5000,), 4), 50, -1, 0),
    "two runs over a border": (torch.arange(4096) // 2047, 5, -1, 0),
    "distinct": (torch.arange(4097).flip(0), 4097, 0, 0),
    "padding only": (torch.full((300,), 7), 50, 7, 0),
    "all outside": (torch.full((300,), 700), 50, -1, 0),
    "one": (torch.tensor([3]), 9, -1, 0),
    "a shard of a large table": (torch.arange(600) * 2**24, 2**31 - 2**24 - 3, -1, 2**30),
}


@pytest.mark.parametrize("name", SLOTS)
def test_slots_are_those_of_the_reference(name, monkeypatch):
    indices, rows, padding, first = SLOTS[name]
    checks = []

    def guarding(shape, strides, dtype, device):
        tensor, check = guarded(shape, dtype, device)
        checks.append(check)
        return tensor

    monkeypatch.setattr(plans, "empty_strided", guarding)
    with npu_offline.emulate("Ascend910B4", races=True, shuffle=1):
        found = lookup.planned(partial(slots, rule=WAYS[0]), soc("Ascend910B4"), indices, rows, padding, False, first)
    expected = reference.slots(indices, rows, -1 if padding < 0 else padding + first, first)
    assert [each.dtype for each in found] == [torch.int32, torch.int32, torch.int64]
    assert all(torch.equal(one.long(), other) for one, other in zip(found, expected, strict=True))
    for check in checks:
        check()
