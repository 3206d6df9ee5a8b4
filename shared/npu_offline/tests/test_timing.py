"""The time model, on compiled kernels: what it says where that can be worked out, and what it refuses to say."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import sample_kernels
import timing_kernels
import torch
from npu_offline import OfflineError, UnsupportedError, check, record
from npu_offline.cli import main
from npu_offline.timing import costs_of, time_launch

SOC = "Ascend910B4"
NEW = "Ascend950PR_957b"
COSTS = costs_of(SOC)
PEAKS = {SOC: 0.8e12, NEW: 1.74e12, "Ascend950DT_9581": 4.224e12}


def timed(kernel, grid, *arguments, events=0, soc=SOC, toolchain="1.2.0", **options):
    with record(soc) as launches:
        kernel[grid](*arguments, **options)
    return time_launch(launches[0], soc=soc, toolchain=toolchain, events=events)


def copied(tiles, block=4096, programs=40, **options):
    x = torch.empty(tiles * block)
    return timed(timing_kernels.copy, (programs,), x, torch.empty_like(x), tiles, BLOCK=block, **options)


@pytest.mark.parametrize("soc", PEAKS)
def test_bound_of_a_copy_is_its_bytes_over_the_peak_bandwidth(soc):
    timing = copied(400, soc=soc)
    assert timing.moved == timing.least == 2 * 400 * 4096 * 4
    assert timing.bound == pytest.approx(timing.moved / PEAKS[soc])
    assert timing.bound < timing.estimate


def test_a_double_buffered_copy_comes_close_to_the_bandwidth_that_copies_reach():
    timing = copied(4000)
    assert 1.0 <= (timing.estimate - COSTS.launch) * COSTS.bandwidth / timing.moved < 1.15
    assert timing.limited_by in ("MTE2", "MTE3")


def test_a_single_buffered_copy_takes_the_sum_of_its_transfers():
    tiles = 400 // 40
    single = copied(400, multibuffer=False)
    transfers = single.busy["MTE2"] + single.busy["MTE3"]
    tile = COSTS.transfer_start + 4096 * 4 / (COSTS.bandwidth / 40)
    assert transfers == pytest.approx(2 * tiles * tile)
    assert single.estimate - COSTS.launch == pytest.approx(transfers, rel=0.02)
    assert copied(400).estimate < single.estimate


def test_estimate_grows_with_the_bytes_and_never_passes_the_bound():
    timings = [copied(tiles) for tiles in (40, 80, 400, 410)]
    assert all(before.estimate < after.estimate for before, after in pairwise(timings))
    assert all(timing.bound < timing.estimate for timing in timings)


def test_short_transfers_take_longer_for_the_same_bytes():
    def single(tiles, block):
        return copied(tiles, block, multibuffer=False).estimate - COSTS.launch

    starts = (1600 - 400) / 40 * 2 * COSTS.transfer_start
    assert single(1600, 1024) - single(400, 4096) == pytest.approx(starts, rel=0.05)
    assert copied(1600, 1024).estimate > copied(400, 4096).estimate


def test_fewer_programs_than_cores_have_more_of_the_bandwidth_each_up_to_their_port():
    one = copied(40, programs=1)
    assert one.busy["MTE2"] == pytest.approx(40 * (COSTS.transfer_start + 4096 * 4 / COSTS.typical_load_port), rel=0.3)


def test_a_core_of_the_ascend910b1_loads_what_the_vendor_says_in_gib():
    assert costs_of("Ascend910B1").typical_load_port == pytest.approx(100.9 * 2**30)


def test_vector_time_is_repeats_times_their_cycles():
    x = torch.empty(4096)
    timing = timed(timing_kernels.exp_often, (1,), x, torch.empty_like(x), BLOCK=4096, TIMES=100)
    repeats = 100 * 4096 * 4 / 256
    assert timing.busy["V"] == pytest.approx(repeats * 2 * COSTS.cycle, rel=0.05)  # vexp: 2 cycles
    assert timing.limited_by == "V"


def test_vector_time_on_registers_is_calls_times_their_instructions():
    x = torch.empty(4096)
    timing = timed(timing_kernels.exp_often, (1,), x, torch.empty_like(x), BLOCK=4096, TIMES=100, soc=NEW)
    assert timing.busy["V"] == pytest.approx(100 * (20 + 4096 / 64 * 4) / 1.65e9, rel=0.01)  # 20 to begin, vexp: 4 cycles
    assert timing.limited_by == "V"


@pytest.mark.parametrize("soc", [SOC, NEW])
def test_a_loop_runs_as_often_as_the_tensor_says_that_its_kernel_reads(soc):
    x = torch.empty(7 * 1024)
    timing = timed(timing_kernels.copy_counted, (1,), torch.tensor([7]), x, torch.empty_like(x), BLOCK=1024, soc=soc)
    assert timing.moved == 2 * 7 * 1024 * 4
    assert timing.scalar_accesses == 1


def test_memory_that_is_read_again_counts_once_for_the_bound():
    x, y = torch.empty(20 * 8192), torch.empty(8192)  # only the first part of x is read
    timing = timed(timing_kernels.read_again, (1,), x, y, TIMES=10, BLOCK=8192)
    assert (timing.moved, timing.least) == (11 * 8192 * 4, 2 * 8192 * 4)


def test_memory_is_known_again_however_a_load_gets_at_it():
    x = torch.empty(8000 * 4 * 1024)  # more than the cache holds
    timing = timed(timing_kernels.read_twice_in_two_ways, (40,), x, torch.empty_like(x), 8000, 1024, M=4, D=1024)
    assert timing.moved == 3 * x.nbytes
    once = 200 * (COSTS.transfer_start + 4 * 1024 * 4 / (COSTS.bandwidth / 40))
    again = 200 * (COSTS.transfer_start + 4 * 1024 * 4 / COSTS.typical_load_port)
    assert once + again < timing.busy["MTE2"] < 2 * once + again  # for some of the time a store moves bytes too


def test_gathered_bytes_do_not_count_for_the_bound():
    index, x = torch.zeros(1000, dtype=torch.int64), torch.empty(5000, 512)
    timing = timed(timing_kernels.gather_rows, (40,), index, x, torch.empty(1000, 512), 1000, D=512)
    assert timing.moved == 2 * 1000 * 512 * 4
    assert timing.bound == pytest.approx(timing.moved / 2 / 0.8e12)


def test_events_of_a_pipe_follow_each_other():
    x, w = torch.empty(64, 512, dtype=torch.bfloat16), torch.empty(512)
    timing = timed(sample_kernels.rms_norm, (2,), x, w, torch.empty_like(x), 64, 1e-6, D=512, BM=4, events=10_000)
    assert {event.pipe for event in timing.events} >= {"V", "MTE2", "MTE3"}
    for pipe in ("V", "MTE2", "MTE3"):
        events = [event for event in timing.events if event.pipe == pipe]
        assert all(before.end <= after.start + 1e-15 for before, after in pairwise(events))
        assert sum(event.end - event.start for event in events) == pytest.approx(timing.busy[pipe])


@pytest.mark.parametrize(("soc", "versions"), [(SOC, ("1.0.0", "1.1.0", "1.2.0")), (NEW, ("1.1.0", "1.2.0"))])
def test_every_toolchain_is_understood(soc, versions):
    x = torch.empty(64, 512, dtype=torch.bfloat16)
    with record(soc) as launches:
        sample_kernels.rms_norm[(2,)](x, torch.empty(512), torch.empty_like(x), 64, 1e-6, D=512, BM=4)
    timings = [time_launch(launches[0], soc=soc, toolchain=version) for version in versions]
    assert len({timing.moved for timing in timings}) == 1
    # On registers version 1.2.0 computes the factor of a row anew for each 64 columns.
    least, most = (extreme(timing.busy["V"] for timing in timings) for extreme in (min, max))
    assert most < (1.5 if soc == SOC else 2) * least


@pytest.mark.parametrize("soc", [SOC, NEW])
def test_a_trip_count_that_the_kernel_computes_is_refused(soc):
    x = torch.empty(7 * 1024)
    with pytest.raises(UnsupportedError, match="depends on a value that the kernel itself computes"):
        timed(timing_kernels.copy_counted, (1,), torch.empty(1), x, torch.empty_like(x), BLOCK=1024, soc=soc)


@pytest.mark.parametrize(("soc", "toolchain"), [(SOC, "1.0.0"), (SOC, "1.2.0"), (NEW, "1.1.0"), (NEW, "1.2.0")])
def test_a_branch_on_what_the_kernel_computes_is_refused_unless_its_source_says_that_it_is_rare(soc, toolchain):
    x, y = torch.empty(4096), torch.empty(4096)
    options = {"BLOCK": 4096, "TIMES": 100, "soc": soc, "toolchain": toolchain}
    with pytest.raises(UnsupportedError, match="depends on a value that the kernel itself computes"):
        timed(timing_kernels.exp_if_large, (1,), x, y, **options)
    timing = timed(timing_kernels.exp_if_large_noted, (1,), x, y, **options)
    assert timing.moved == 2 * 4096 * 4
    few = 4096 * 4 / 256 * 2 * 20 * costs_of(soc).cycle
    assert timing.busy["V"] < few  # the branch's hundred exponentials are not in it
    x = torch.empty(6 * 4096)
    timing = timed(timing_kernels.exp_of_large_tiles_noted, (2,), x, torch.empty_like(x), 6, **options)
    assert timing.moved == 6 * 2 * 4096 * 4
    assert timing.busy["V"] < 3 * few


@pytest.mark.parametrize("soc", [SOC, NEW])
def test_a_note_on_rare_branches_says_nothing_of_loops_and_needs_a_reason(soc):
    x = torch.empty(4096)
    with pytest.raises(UnsupportedError, match="depends on a value that the kernel itself computes"):
        timed(timing_kernels.copy_counted_noted, (1,), torch.empty(1), x, torch.empty_like(x), BLOCK=1024, soc=soc)
    with pytest.raises(OfflineError, match="must be `# time: rare: REASON`"):
        timed(timing_kernels.copy_noted_without_reason, (1,), x, torch.empty_like(x), BLOCK=4096, soc=soc)


@pytest.mark.parametrize("toolchain", ["1.1.0", "1.2.0"])
def test_cube_kernels_are_refused_on_the_ascend950(toolchain):
    a, b = torch.empty(64, 64), torch.empty(64, 64)
    sizes = {"BM": 64, "BN": 64, "BK": 64}
    with pytest.raises(UnsupportedError, match=f"soc is {NEW}, must be a chip whose cube cores' costs are known"):
        timed(sample_kernels.matmul, (1,), a, b, torch.empty(64, 64), 64, 64, 64, **sizes, soc=NEW, toolchain=toolchain)
    a, b, c = torch.empty(64, 256, dtype=torch.bfloat16), torch.empty(256, 64, dtype=torch.bfloat16), torch.empty(64, 64)
    with pytest.raises(UnsupportedError, match="cube cores' costs are known"):
        timed(timing_kernels.exp_of_matmul, (1,), a, b, c, 256, B=64, soc=NEW, toolchain=toolchain)


@pytest.mark.parametrize("name", ["attn_res", "embedding", "fused_linear_cross_entropy", "rms_norm"])
def test_an_operator_is_predicted_on_the_ascend950(name):
    pytest.importorskip(f"npu_{name}", reason="the operators' packages are not installed")
    package = Path(__file__).parents[3] / "packages" / name
    label = check.load_sample(package)[0]
    first, *_ = check.launches_of([call for call in check.load_calls(package) if call[0] == label], NEW)
    timing = time_launch(first, soc=NEW)
    assert 0 < timing.bound < timing.estimate


@pytest.mark.parametrize("soc", ["Ascend910B2C", "Ascend950PR_950z", "Ascend950DT_95A1", "Ascend910_9579"])
def test_a_chip_without_known_rates_is_refused(soc):
    with pytest.raises(UnsupportedError, match=soc):
        costs_of(soc)


def test_a_kernel_that_does_not_fit_has_no_time():
    with pytest.raises(OfflineError, match="does not fit"):
        copied(2, block=65536)


CALLS = """
import timing_kernels, torch
def calls():
    for tiles in (40, 80):
        x = torch.empty(tiles * 1024)
        yield f"{tiles} tiles", lambda x=x, n=tiles: timing_kernels.copy[(40,)](x, torch.empty_like(x), n, BLOCK=1024)
"""


def test_command_prints_a_line_for_each_launch_and_writes_timelines(tmp_path, capsys):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "ascend_calls.py").write_text(CALLS)
    results, timeline = tmp_path / "results.json", tmp_path / "timeline.json"
    assert main(["time", str(tmp_path), "--json", str(results), "--timeline", str(timeline)]) == 0
    assert "copy" in capsys.readouterr().out
    first, second = json.loads(results.read_text())
    assert first["moved"] * 2 == second["moved"]
    drawn = [event for event in json.loads(timeline.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in drawn} == {0, 1}
    assert sum(event["args"]["bytes"] for event in drawn if event["pid"] == 0) == first["moved"] / 40
    assert main(["time", str(tmp_path), "--call", "no such call"]) == 2
