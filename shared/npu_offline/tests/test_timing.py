"""The time model, on compiled kernels: what it says where that can be worked out, and what it refuses to say."""

import ast
import json
from itertools import pairwise
from pathlib import Path

import pytest
import sample_kernels
import timing_kernels
import torch
from npu_offline import OfflineError, UnsupportedError, check, record
from npu_offline.cli import main
from npu_offline.timing import constants, costs_of, time_launch
from npu_offline.timing.costs import VECTOR_COSTS

SOC = "Ascend910B4"
NEW = "Ascend950PR_957b"
COSTS = costs_of(SOC)
LAUNCH = COSTS.launch + 40 * COSTS.launch_block  # of 40 programs
PEAKS = {SOC: 0.8e12, NEW: 1.74e12, "Ascend950DT_9581": 4.224e12}


def timed(kernel, grid, *arguments, events=0, soc=SOC, toolchain="1.2.0", l2="cold", clock=None, **options):
    with record(soc) as launches:
        kernel[grid](*arguments, **options)
    return time_launch(launches[0], soc=soc, toolchain=toolchain, events=events, l2=l2, clock=clock)


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
    assert 0.999 < (timing.estimate - LAUNCH) * COSTS.copy_bandwidth / timing.moved < 1.15
    assert timing.limited_by in ("MTE2", "MTE3")


def test_a_single_buffered_copy_takes_the_sum_of_its_transfers():
    single = copied(10, multibuffer=False, programs=1)
    transfers = single.busy["MTE2"] + single.busy["MTE3"]
    assert single.estimate - COSTS.launch - COSTS.launch_block == pytest.approx(transfers, rel=0.05)
    assert copied(10, programs=1).estimate < single.estimate


def test_a_launch_costs_more_with_every_core_and_a_core_with_every_further_program():
    one, two, all_cores, twice = (copied(programs, 256, programs=programs) for programs in (1, 2, 40, 80))
    assert two.estimate - one.estimate == pytest.approx(COSTS.launch_block, rel=0.01)
    further = twice.estimate - 2 * (all_cores.estimate - LAUNCH) - LAUNCH
    assert 0.8 * COSTS.next_program < further <= COSTS.next_program  # others have its bandwidth meanwhile


def test_every_constant_has_a_source_a_chip_and_a_stack():
    for name, constant in constants.constants().items():
        assert constant.source in constants.SOURCES, name
        assert constant.meaning and constant.chip and constant.stack, name
        assert (constant.stack == "none") <= (not constant.fitted), f"{name} was fitted to points of no stack"
    assert {cost.source for cost in VECTOR_COSTS.values()} <= set(constants.SOURCES)


def test_no_number_stands_outside_the_tables_of_constants():
    folder = Path(constants.__file__).parent
    for module in ("ascend950", "cache", "core", "cube_costs", "sharing", "simulation"):
        numbers = {node.value for node in ast.walk(ast.parse((folder / f"{module}.py").read_text())) if is_number(node)}
        assert numbers <= {0, 1, 2, 3, 4}, module  # letters of a kind of core, parts of a sum, bytes of fp32


def is_number(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool)


@pytest.mark.parametrize(("tiles", "held"), [(400, True), (4000, False)])
def test_a_warm_cache_is_faster_where_it_holds_the_launch_and_a_dirty_one_slower(tiles, held):
    cold, warm, dirty = (copied(tiles, l2=state) for state in ("cold", "warm", "dirty"))
    assert (warm.estimate < cold.estimate) == held
    assert warm.bound < cold.bound == dirty.bound
    assert dirty.estimate > cold.estimate
    assert [timing.l2 for timing in (cold, warm, dirty)] == ["cold", "warm", "dirty"]


def test_an_estimate_has_a_range_where_published_times_were_compared():
    timing = copied(400)
    assert timing.range[0] < timing.estimate < timing.range[1]
    assert copied(400, soc=NEW).range is None


def test_a_core_that_runs_several_programs_takes_their_mean():
    x, y = torch.empty(8 * 4096 * 40), torch.empty(8 * 4096 * 40)
    long, every, mixed = (
        timed(timing_kernels.copy_some, (programs,), x, y, first, BLOCK=4096, TIMES=8)
        for programs, first in ((400, 400), (400, 0), (400, 40))
    )
    assert every.estimate < mixed.estimate < (every.estimate + long.estimate) / 2


def test_a_chip_without_a_published_clock_takes_the_callers():
    slow, fast = (copied(10, programs=1, soc="Ascend910_9392", clock=hertz) for hertz in (1.5e9, 1.8e9))
    assert fast.estimate < slow.estimate
    assert fast.clock == 1.8e9
    with pytest.raises(UnsupportedError, match="clock"):
        copied(400, soc="Ascend910_9392")
    with pytest.raises(OfflineError, match="published"):
        copied(400, clock=1.8e9)


def test_estimate_grows_with_the_bytes_and_never_passes_the_bound():
    timings = [copied(tiles) for tiles in (40, 80, 400, 410)]
    assert all(before.estimate < after.estimate for before, after in pairwise(timings))
    assert all(timing.bound < timing.estimate for timing in timings)


def test_short_transfers_take_longer_for_the_same_bytes():
    short, long = (copied(n, block, programs=1, multibuffer=False) for n, block in ((40, 1024), (10, 4096)))
    waits = 30 * (2 * COSTS.transfer_latency + COSTS.memory_latency)
    assert waits < short.estimate - long.estimate < 1.5 * waits


def test_fewer_programs_than_cores_have_more_of_the_bandwidth_each_up_to_their_port():
    one, all_cores = copied(40, programs=1), copied(1600)
    alone = 40 * (4096 * 4 / COSTS.typical_load_port)
    assert alone < one.busy["MTE2"] < 2 * alone
    assert all_cores.busy["MTE2"] > 1.5 * one.busy["MTE2"]


def test_a_core_of_the_ascend910b1_loads_what_the_vendor_says_in_gib():
    assert costs_of("Ascend910B1").typical_load_port == pytest.approx(100.9 * 2**30)


def test_vector_time_is_repeats_times_their_cycles():
    x = torch.empty(4096)
    timing = timed(timing_kernels.exp_often, (1,), x, torch.empty_like(x), BLOCK=4096, TIMES=100)
    repeats, latency = 4096 * 4 / 256, 13 + 12  # each waits for the one before
    assert timing.busy["V"] == pytest.approx(100 * (repeats * 2 + latency) * COSTS.cycle, rel=0.05)  # vexp: 2 cycles
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
    again = timed(timing_kernels.read_twice_in_two_ways, (40,), x, torch.empty_like(x), 8000, 1024, M=4, D=1024, l2="warm")
    assert timing.estimate - LAUNCH < 1.2 * 2 * x.nbytes / COSTS.copy_bandwidth  # its second reads take nothing from memory
    assert again.estimate == timing.estimate  # the cache cannot hold it


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
    for command in ("time", "check", "lint"):
        assert main([command, str(tmp_path), "--call", "no such call"]) == 2
