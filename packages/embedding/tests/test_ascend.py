"""What the Ascend compilers make of the kernels, and how many bytes they move: no chip, and no time, involved."""

import math
import re
from functools import partial

import lookup
import npu_offline
import pytest
import torch
from npu_embedding import embedding, explain
from npu_embedding.lookup.ascend import GATHER, PARTIALS, SUMS
from npu_embedding.rows import RowShape, row_tiling
from npu_tiling import soc

from testing.ascend import *  # noqa: F403
from testing.ascend import Batches, Computed, launches, moved, required

launches_of = partial(launches, __file__)

TILES = ("fp32 768", "bf16 7168", "fp32 123", "fp32 16384", "bf16 4096, by frequency")


def may_lose_a_buffer(launch, soc, toolchain):
    return launch.name in SORT


def check_report(launch, report):
    """The scalar unit reads indices, never an element of a row; the one thing it writes is the length of a run."""
    assert "[NOTE]" not in report.message  # the last version retries without double buffering, and says so
    if launch.name in SORT:
        return
    loads = re.findall(r"memref\.load .* : memref<(\S+?)[,>]", report.stages["final"])
    stores = re.findall(r"memref\.store .* : memref<(\S+?)[,>]", report.stages["final"])
    row, tile = launch.constants["BLOCK_N"], launch.constants["BLOCK_N"] * launch.constants.get("BLOCK_M", 1)
    kind = "i32" if launch.signature.get("p_weight") == "*i32" else "i16"
    # Rows of zeros and of NaN are written once and stored often: one copy of them is enough, so count buffers.
    if launch.name in ("sum_rows_kernel", "add_partials_kernel"):
        assert report.double_buffered
    elif launch.constants["GATHER"]:
        assert buffers(report)[tile, kind] >= 2
    else:
        assert buffers(report)[row, kind] >= 4
    assert set(loads) <= {"1xi64", "1xi32", f"{launch.constants.get('BLOCK_M')}xi64"}
    assert set(stores) <= {"1xf32", "1xi64"}  # the latter a counter of multi-buffering


def look_up(n, rows):
    weight = torch.zeros(rows, 16, requires_grad=True)
    embedding(torch.zeros(n, dtype=torch.int64), weight).backward(torch.zeros(n, 16))


def computed(name, *sizes, outside=False, **options):
    case = lookup.make(*sizes, **options)
    if outside:
        case.indices[5] = case.weight.shape[0]
    return Computed(name, lambda: lookup.run(case, "cpu"), lambda found: lookup.check(case, found), tensors=5)


SIZES = ((1, 7), (2, 1000), (64, 31), (1000, 16), (2000, 300), (5000, 300), (70000, 300), (140001, 7))
INDEPENDENT = (Batches("indices and rows", look_up, SIZES, 5),)
ON_OTHER_CHIPS = (computed("123", 900, 200, 123, torch.bfloat16, "zipf"),)
IN_ANY_ORDER = (computed("64", 900, 200, 64, kind="zipf"),)
GUARDED = tuple(  # out, dweight, keys, order, partial sums
    computed(f"{width}", 77, 30, width, kind="zipf", padding_idx=2, vocab_range=(0, 30), outside=True)
    for width in (1, 7, 123, 512, 16411)
)

SORT = ("sort_runs_kernel", "merge_runs_kernel")


def buffers(report):
    """How many addresses each kind of on-chip buffer has, by elements and type: (4096, "f32")."""
    counts: dict[tuple[int, str], int] = {}
    for shape, kind in re.findall(
        r"pointer_cast\(.*?\) : memref<([\dx]+)x(\w+), #hivm.address_space<ub>>", report.stages["final"]
    ):
        key = (math.prod(map(int, shape.split("x"))), kind)
        counts[key] = counts.get(key, 0) + 1
    return counts


@pytest.mark.parametrize("label", ["bf16 4096", "fp32 4096", "bf16 4096, by frequency"])
@pytest.mark.parametrize("rows", [2, 8])
def test_declared_tiles_are_what_the_compiler_needs(label, rows):
    """Never less, or a chosen tile would not compile; not much more, or rows would be split that fit."""
    chip, width = soc("Ascend910B4"), 65536
    itemsize = 4 if label.startswith("fp32") else 2
    forward, _, sums, partials = launches_of(label)
    shape = RowShape(width=width, itemsize=itemsize, device=chip)
    for launch, kernel in ((forward, GATHER), (sums, SUMS), (partials, PARTIALS)):
        tile = row_tiling(kernel, shape, rows, width, why="", decided_at="")
        declared, needed = tile.ub_bytes, required(launch, tile.constants)
        assert needed <= declared <= 1.02 * needed


def emulate(case, chip="Ascend910B4", **options):
    with npu_offline.emulate(chip, **options) as emulation:
        results = lookup.run(case, "cpu")
    return emulation.launches, results


@pytest.mark.parametrize("kind", ["uniform", "zipf", "equal"])
@pytest.mark.parametrize(("width", "dtype"), [(256, torch.bfloat16), (768, torch.float32), (4096, torch.bfloat16)])
def test_memory_traffic_is_the_minimum(width, dtype, kind):
    n, rows = 3000, 5000
    case = lookup.make(n, rows, width, dtype, kind)
    (forward, runs, merge, *backward), results = emulate(case)
    lookup.check(case, results)
    whole = 4096  # indices of two blocks
    assert moved(runs) == 8 * n + 8 * whole  # indices; keys and order
    assert merge.arguments["p_merged_key"].written == merge.arguments["p_merged_order"].written == 4 * whole
    assert (
        merge.arguments["p_order"].read <= 4 * 4 * whole
    )  # a tile for each run, of which places before its part are not used
    row = width * dtype.itemsize
    assert 2 * n * row <= moved(forward) <= 1.05 * 2 * n * row
    assert (n + rows) * row <= sum(map(moved, backward)) <= 1.05 * (n + rows) * row
    assert sum(launch.arguments["p_dweight"].written for launch in backward) == rows * row  # each row once
    assert backward[0].arguments["p_dy"].read == n * row
    tile = forward.constants["BLOCK_M"] * row
    assert forward.arguments["p_out"].written / forward.arguments["p_out"].transfers > 0.99 * min(tile, n * row)
    for launch in (forward, *backward):
        for name, traffic in launch.arguments.items():
            assert traffic.atomics == 0
            assert traffic.scalars == 0 or name in ("p_index", "p_order", "p_sorted")


@pytest.mark.parametrize("kind", ["uniform", "zipf", "equal"])
def test_every_row_is_written_once_and_long_padding_is_not_read(kind):
    case = lookup.make(2000, 300, 256, kind=kind)
    case.padding_idx = int(case.indices.mode().values)
    (_, _, sums, partials), results = emulate(case)
    lookup.check(case, results)
    assert sum(launch.arguments["p_dweight"].written for launch in (sums, partials)) == 300 * 256 * 4
    padded = int((case.indices == case.padding_idx).sum())
    assert sums.arguments["p_dy"].read == (2000 - padded) * 256 * 4


def test_a_shard_reads_only_what_it_has():
    case = lookup.make(3000, 500, 768, vocab_range=(500, 1000))
    case.indices = torch.randint(0, 4000, (3000,), generator=torch.Generator().manual_seed(0))
    (forward, *_, sums, _), results = emulate(case)
    lookup.check(case, results)
    own = int(((case.indices >= 500) & (case.indices < 1000)).sum()) * 768 * 4
    assert forward.arguments["p_weight"].read == sums.arguments["p_dy"].read == own
    assert forward.arguments["p_out"].written == case.dy.numel() * 4


@pytest.mark.parametrize("rows", [300, 20000])
@pytest.mark.parametrize("kind", ["zipf", "equal"])
def test_every_core_gets_as_much_to_read_and_to_write(kind, rows):
    """However long the runs and the gaps between them: a chunk reads and writes as many rows as any."""
    case = lookup.make(2000, rows, 64, kind=kind)
    (_, _, sums, partials), results = emulate(case)
    lookup.check(case, results)
    assert sums.grid == (40, 1, 1)
    borders = partials.arguments["p_partials"].read // (64 * 4)
    assert borders == sums.arguments["p_partials"].written // (64 * 4) <= 2 * 39
    least = -(-2000 // -(-(2000 + rows) // 40))  # chunks of a run of all indices: a tail, and a head of each further one
    assert kind != "equal" or least <= borders <= least + 1


def test_more_rows_than_there_are_keys_and_more_indices_than_places_are_refused():
    rows = 2**31 - 2**24 - 2
    with pytest.raises(ValueError, match=f"the table has {rows} rows and must have at most {rows - 1} on Ascend910B4"):
        explain(tokens=5, vocabulary=rows, width=8, chip="Ascend910B4", backward=True)
    explain(tokens=5, vocabulary=rows - 1, width=8, chip="Ascend910B4", backward=True)
    with pytest.raises(ValueError, match=f"indices has {2**30 + 1} elements and must have at most {2**30} on Ascend910B4"):
        explain(tokens=2**30 + 1, vocabulary=5, width=8, chip="Ascend910B4", backward=True)
    explain(tokens=2**30, vocabulary=5, width=8, chip="Ascend910B4", backward=True)


@pytest.mark.parametrize(("n", "sparse"), [(40, False), (40, True), (140000, False), (140000, True)])
def test_no_step_of_a_gradient_is_one_of_the_ai_cpu(n, sparse):
    """CANN sorts integers, and searches among what is sorted, there."""
    weight = torch.zeros(50, 8, requires_grad=True)
    cpu = [torch.profiler.ProfilerActivity.CPU]  # not the device's, which needs a library of CANN's
    with npu_offline.record("Ascend910B4"), torch.profiler.profile(activities=cpu, record_shapes=True) as profile:
        embedding(torch.arange(n) % 50, weight, sparse=sparse).backward(torch.ones(n, 8))
    events = profile.profiler.kineto_results.events()
    called = {event.name().removeprefix("aten::") for event in events}
    assert not {"searchsorted", "bucketize", "sort", "argsort", "cumsum", "cummax", "unique", "_unique2"} & called
