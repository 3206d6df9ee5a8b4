"""How kernels find sources: as arguments, or through a table of distances, and what lives until they are read."""

import npu_tiling
import pytest
import torch
from npu_attn_res import sources
from npu_tiling.plans import Launch, Plan, Reached, run_plan, slots_in

DEVICES = {
    "cuda": npu_tiling.Device("NVIDIA H200", "cuda", "sm_90", 132, 132, 232448, ub_align=16, max_grid=2**31 - 1),
    "npu": npu_tiling.soc("Ascend910B4"),
}


def plan_of(place, blocks, gradients=(), **options):
    """A plan that finds blocks, and what it found; gradients are arguments too."""
    plan = Plan(DEVICES[place])
    slots, more = ([plan.argument(one) for one in many] for many in (blocks, gradients))
    return plan, sources.sources_of(plan, slots, more, stacked=False, **options)


@pytest.fixture
def entries(monkeypatch):
    """What launches write into tables."""
    found = []
    monkeypatch.setattr("npu_tiling.launch.Kernels.launch", lambda *arguments: found.extend(arguments[-1][1:]))
    return found


def run(plan, tensors, read):
    """Runs a plan that also hands what `read` says to the caller."""
    kept = []
    plan.torch(lambda *given: kept.extend(given), *read)
    run_plan(plan, tensors, lambda replaced: plan)
    return kept


@pytest.mark.parametrize("place", DEVICES)
@pytest.mark.parametrize("block", ["contiguous", "transposed", "of two strides"])
def test_every_source_lives_until_the_launch_that_reads_it(place, block, entries):
    """On a device a kernel is given one source and distances: nothing else keeps the copies of the others."""
    blocks = [torch.randn(6, 16) for _ in range(4)]
    if block == "transposed":
        blocks = [tensor.t().contiguous().t() for tensor in blocks]
    elif block == "of two strides":
        blocks = [tensor if i else torch.randn(6, 32)[:, :16] for i, tensor in enumerate(blocks)]
    plan, found = plan_of(place, blocks, in_tables=True)
    assert type(found.pointers.base) is Reached and slots_in(found.pointers.base) == [*found.blocks]
    copies = run(plan, blocks, found.pointers.base)
    first = copies[0].data_ptr()
    read = {first + entry * blocks[0].itemsize for entry in entries[: len(blocks)]}
    assert len(read) == len(blocks) and read == {tensor.data_ptr() for tensor in copies}
    for tensor, copy in zip(blocks, copies, strict=True):
        assert torch.equal(tensor, copy)


def test_a_launch_keeps_all_sources_that_it_reaches():
    plan, found = plan_of("npu", [torch.randn(16, 6).t() for _ in range(3)], in_tables=True)
    plan.steps.append(Launch(None, "", "", None, 1, {"p_v": found.pointers.base}, {}, (found.pointers.base,), (), None))
    ends = plan.last_uses()
    assert {slot.number for slot in found.blocks} <= {*ends[-1]}


@pytest.fixture(params=["3.6.0"])
def triton(request, monkeypatch):
    monkeypatch.setattr(sources, "version", lambda name: request.param)
    sources._has_tuples.cache_clear()
    yield request.param
    sources._has_tuples.cache_clear()


@pytest.mark.parametrize("triton", ["3.4.0", "3.10.1", None], indirect=True)
@pytest.mark.parametrize("n_blocks", [2, 5, 32])
@pytest.mark.parametrize("missing", [(), (0, 1)])
def test_a_kernel_for_cuda_gets_each_of_a_few_blocks_as_an_argument(n_blocks, missing, triton):
    blocks = [torch.randn(3, 16) for _ in range(n_blocks)]
    gradients = [None if i in missing else torch.empty(3, 16) for i in range(n_blocks)]
    plan, found = plan_of("cuda", blocks, gradients)
    assert found.pointers.table is None and not plan.steps
    for at, wanted in ((found.pointers, found.blocks), (found.gradient_pointers, found.gradients)):
        if all(one is None for one in wanted):
            assert (at.base, at.others, at.needed) == (None, None, 0)
            continue
        given = (at.base, *at.others)
        assert len(given) in (2, 8, 32) and len(given) >= n_blocks
        for i, one in enumerate(wanted):
            assert bool(at.needed >> i & 1) == (one is not None)
            assert one is None or given[i] is one
        assert at.needed < 2**n_blocks
        assert None not in given


@pytest.mark.parametrize(
    ("place", "n_blocks", "triton"), [("cuda", 33, "3.6.0"), ("npu", 5, "3.6.0"), ("cuda", 5, "3.3.1")], indirect=["triton"]
)
def test_other_blocks_are_found_through_a_table(place, n_blocks, triton, entries):
    blocks = [torch.randn(3, 16) for _ in range(n_blocks)]
    plan, found = plan_of(place, blocks)
    assert found.pointers.others is None
    run(plan, blocks, found.pointers.base)
    assert [blocks[0].data_ptr() + 4 * entry for entry in entries[:n_blocks]] == [block.data_ptr() for block in blocks]


def test_blocks_that_were_arguments_are_put_into_a_table_for_kernels_that_take_columns(triton, entries):
    blocks, gradients = [torch.randn(3, 16) for _ in range(3)], [torch.empty(3, 16), None, torch.empty(3, 16)]
    plan, found = plan_of("cuda", blocks, gradients)
    assert not plan.steps
    tabled = found.in_tables(plan)
    assert any(type(step) is Launch for step in plan.steps)
    assert tabled.pointers.others is None and tabled.gradient_pointers.others is None
    run(plan, [*blocks, *gradients], tabled.pointers.base)
    assert [blocks[0].data_ptr() + 4 * entry for entry in entries[:3]] == [block.data_ptr() for block in blocks]
    assert entries[5] == sources._NO_GRADIENT
    assert [gradients[0].data_ptr() + 4 * entries[i] for i in (4, 6)] == [gradients[i].data_ptr() for i in (0, 2)]
