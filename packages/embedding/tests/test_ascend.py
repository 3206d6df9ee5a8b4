"""What the Ascend compilers make of the kernels, and how many bytes they move: no chip, and no time, involved."""

import math
import re
from pathlib import Path

import lookup
import npu_offline
import pytest
import torch
from npu_embedding import embedding, explain
from npu_embedding.lookup.ascend import GATHER, PARTIALS, SUMS
from npu_embedding.rows import RowShape, row_tiling
from npu_offline.check import load_calls
from npu_tiling import Kernels, plans, soc
from npu_tiling import launch as fallback

REASON = "needs triton-ascend and the three toolchains (npu-offline fetch)"
pytestmark = [pytest.mark.compilers, pytest.mark.skipif(len(npu_offline.installed()) < 3, reason=REASON)]
SORT = ("sort_runs_kernel", "merge_runs_kernel")
CALLS = dict(load_calls(Path(__file__).parents[1]))


def launches_of(label, chip="Ascend910B4"):
    with npu_offline.record(chip) as records:
        CALLS[label]()
    return records


def buffers(report):
    """How many addresses each kind of on-chip buffer has, by elements and type: (4096, "f32")."""
    counts: dict[tuple[int, str], int] = {}
    for shape, kind in re.findall(
        r"pointer_cast\(.*?\) : memref<([\dx]+)x(\w+), #hivm.address_space<ub>>", report.stages["final"]
    ):
        key = (math.prod(map(int, shape.split("x"))), kind)
        counts[key] = counts.get(key, 0) + 1
    return counts


@pytest.mark.uncollected(
    "the toolchain has no such target", lambda chip, toolchain: not npu_offline.supported(chip, toolchain)
)
@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
@pytest.mark.parametrize("chip", ["Ascend910B4", "Ascend950PR_957b"])
@pytest.mark.parametrize("label", ["fp32 768", "bf16 7168", "fp32 123", "fp32 16384", "bf16 4096, by frequency"])
def test_tiles_fit_are_double_buffered_and_moved_whole(label, chip, toolchain):
    for launch in launches_of(label, chip):
        report = npu_offline.compile_kernel(launch, soc=chip, toolchain=toolchain)
        assert report.fits, report.message
        assert "[NOTE]" not in report.message  # the last version retries without double buffering, and says so
        # The scalar unit reads indices, never an element of a row; the one thing it writes is the length of a run.
        loads = re.findall(r"memref\.load .* : memref<(\S+?)[,>]", report.stages["final"])
        stores = re.findall(r"memref\.store .* : memref<(\S+?)[,>]", report.stages["final"])
        if launch.name in SORT:
            continue
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


def required(launch, **blocks):
    """UB that the compiler asks for, where it refuses a tile and has reused every buffer it can."""
    constants = {**launch.constants, **blocks}
    report = npu_offline.compile_kernel(
        launch.kernel, launch.signature, constants, soc="Ascend910B4", toolchain="1.1.0", options=launch.options
    )
    assert not report.fits
    return report.required_ub_bytes


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
        declared, needed = tile.ub_bytes, required(launch, **tile.constants)
        assert needed <= declared <= 1.02 * needed


def test_compiling_depends_neither_on_the_number_of_indices_nor_of_rows():
    kernels = set()
    for n, rows in ((1, 7), (2, 1000), (64, 31), (1000, 16), (2000, 300), (5000, 300), (70000, 300), (140001, 7)):
        with npu_offline.record("Ascend910B4") as records:
            weight = torch.zeros(rows, 16, requires_grad=True)
            embedding(torch.zeros(n, dtype=torch.int64), weight).backward(torch.zeros(n, 16))
        kernels |= {(r.name, str(r.signature), str(r.constants), str(r.divisible)) for r in records}
    assert len(kernels) == 5


def emulate(case, chip="Ascend910B4", **options):
    with npu_offline.emulate(chip, **options) as emulation:
        results = lookup.run(case, "cpu")
    return emulation.launches, results


def moved(launch):
    return sum(traffic.read + traffic.written for traffic in launch.arguments.values())


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


@pytest.mark.parametrize("chip", ["Ascend910B1", "Ascend950DT_95A1"])
def test_other_chips_give_the_same_result(chip):
    case = lookup.make(900, 200, 123, torch.bfloat16, "zipf")
    lookup.check(case, emulate(case, chip)[1])


def test_programs_in_any_order_and_at_once_give_the_same_bits():
    case = lookup.make(900, 200, 64, kind="zipf")
    results = [emulate(case, threads=threads, shuffle=shuffle)[1] for threads, shuffle in ((1, None), (1, 1), (2, 2))]
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("width", [1, 7, 123, 512, 16411])
def test_nothing_outside_the_tensors_is_written(width, monkeypatch):
    """Every tensor that the operator allocates stands between guard values."""
    from testing.memory import guarded

    checks = []

    def guarding(shape, strides, dtype, device):
        tensor, check = guarded(shape, dtype, device)
        checks.append(check)
        return tensor

    monkeypatch.setattr(plans, "empty_strided", guarding)
    case = lookup.make(77, 30, width, kind="zipf", padding_idx=2, vocab_range=(0, 30))
    case.indices[5] = 30
    with npu_offline.emulate("Ascend910B4"):
        weight = lookup.leaf(case.weight, "cpu")
        out = embedding(case.indices, weight, **case.options)
        (dweight,) = torch.autograd.grad(out, weight, case.dy)
    assert len(checks) == 5  # out, dweight, keys, order, partial sums
    for check in checks:
        check()
    lookup.check(case, (out.detach(), dweight))


def test_a_compiler_that_needs_more_gets_a_smaller_tile(monkeypatch):
    """The launches as a user's compiler would refuse them: everything of more than 2 rows or 1024 columns overflows."""

    real, refused = Kernels.launch, []

    def refusing(self, module, kernel, decision, *arguments):
        if kernel not in SORT and (decision.constants.get("BLOCK_M", 0) > 2 or decision.constants["BLOCK_N"] > 1024):
            refused.append(kernel)
            raise RuntimeError("error: ub overflow, requires 1966592 bits while 1572864 bits available!")
        real(self, module, kernel, decision, *arguments)

    monkeypatch.setattr(fallback, "replaced", {})
    monkeypatch.setattr(Kernels, "launch", refusing)
    case = lookup.make(300, 50, 2048, torch.bfloat16, "zipf", seed=3)
    with pytest.warns(RuntimeWarning, match="overflows the Unified Buffer"):
        lookup.check(case, emulate(case)[1])
    assert set(refused) == {"gather_rows_kernel", "sum_rows_kernel", "add_partials_kernel"}
    refused.clear()
    lookup.check(case, emulate(case)[1])
    assert not refused  # what worked is remembered
