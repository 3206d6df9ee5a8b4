"""The time model of kernels with matrix products: cube cores alone, and with their vector cores."""

import dataclasses

import pytest
import sample_kernels
import timing_kernels
import torch
from npu_offline import UnsupportedError, record
from npu_offline.commands.time import chrome_trace
from npu_offline.timing import costs_of, cube_costs, model, time_launch

CUBE_SUSTAINED = 221.5e12  # bf16 matmul of PyTorch, operations a second; where it was published has not been noted
SOC, TOOLCHAINS = "Ascend910B4", ("1.0.0", "1.1.0", "1.2.0")
COSTS = costs_of(SOC)
PEAK = 20 * 2 * 16**3 / COSTS.cycle  # of bf16: operations a second of all cube cores
BF16, FP32 = torch.bfloat16, torch.float32


def timed(kernel, grid, *arguments, toolchain="1.2.0", events=0, **options):
    with record(SOC) as launches:
        kernel[grid](*arguments, **options)
    return time_launch(launches[0], soc=SOC, toolchain=toolchain, events=events)


def product(m, n, k, tile, dtype=BF16, programs=20, **options):
    a, b, c = torch.empty(m, k, dtype=dtype), torch.empty(k, n, dtype=dtype), torch.empty(m, n, dtype=dtype)
    sizes = dict(zip(("BM", "BN", "BK"), tile, strict=True))
    return timed(timing_kernels.matmul, (programs,), a, b, c, m, n, k, **sizes, **options)


def mixed(toolchain, tiles=40, k=256, size=64, **options):
    a, b, c = torch.empty(tiles * size, k, dtype=BF16), torch.empty(k, size, dtype=BF16), torch.empty(tiles * size, size)
    kernel = timing_kernels.matmul_of_exp
    return timed(kernel, (20,), a, b, c.to(BF16), tiles, k, B=size, toolchain=toolchain, **options)


def copied():
    x = torch.empty(4096)
    return timed(timing_kernels.exp_often, (1,), x, torch.empty_like(x), BLOCK=4096, TIMES=1).estimate


def test_the_matrix_unit_is_busy_for_its_operations_at_its_peak():
    timing = product(640, 1024, 4096, (128, 256, 256))
    seconds = 2 * 640 * 1024 * 4096 / PEAK
    assert seconds <= timing.busy["M"] < 1.05 * seconds
    assert timing.estimate > timing.busy["M"]
    assert timing.bound == pytest.approx(seconds)


def test_a_product_of_fp32_keeps_the_matrix_unit_four_times_as_long_and_is_limited_by_it():
    timing = product(640, 1024, 2048, (128, 256, 64), FP32, toolchain="1.0.0")
    seconds = 4 * 2 * 640 * 1024 * 2048 / PEAK
    assert timing.limited_by == "M"
    assert seconds <= timing.busy["M"] < 1.05 * seconds
    assert seconds < timing.estimate - COSTS.launch < 1.2 * seconds


def test_a_product_that_keeps_its_flags_to_itself_waits_for_its_first_operands_every_time():
    outside, inside = (product(640, 1024, 2048, (128, 256, 64), FP32, toolchain=version) for version in ("1.0.0", "1.2.0"))
    nbytes = 128 * 32 * 4, 256 * 32 * 4  # a half of L0 holds 32 numbers of 256 rows
    first = (cube_costs.to_l0a(nbytes[0])[0] + cube_costs.to_l0b(nbytes[1])[0]) * COSTS.cycle
    assert inside.estimate - outside.estimate == pytest.approx(2048 / 64 * first, rel=0.1)


def test_small_tiles_starve_the_matrix_unit():
    timing = product(640, 640, 1024, (32, 32, 32))
    assert timing.limited_by in ("MTE2", "S")
    assert timing.busy["MTE2"] > 5 * timing.busy["M"]
    tiles = 400 // 20 * 1024 // 32
    assert timing.busy["S"] > 5 * tiles * COSTS.issue * COSTS.cycle  # two loads, two copies, a product


@pytest.mark.parametrize("tile", [(32, 32, 32), (64, 64, 128), (128, 128, 128), (128, 256, 64)])
def test_no_estimate_beats_the_bound(tile):
    for timing in (product(640, 1280, 512, tile), product(256, 256, 128, tile), product(640, 1280, 512, tile, FP32)):
        assert timing.bound < timing.estimate


def test_bound_of_a_large_product_is_below_what_is_published_and_the_estimate_above_the_peak():
    timing = product(4096, 4096, 4096, (128, 256, 256))
    operations = 2 * 4096**3
    assert timing.bound < operations / CUBE_SUSTAINED
    assert timing.estimate > operations / PEAK
    assert timing.least == 3 * 4096 * 4096 * 2


def test_what_the_cache_holds_is_loaded_at_the_rate_of_the_port():
    timing = product(2560, 4096, 4096, (128, 256, 256))
    loads = (2560 // 128) * (4096 // 256) // 20 * (4096 // 256)
    seconds = loads * (2 * COSTS.transfer_start + (128 + 256) * 256 * 2 / COSTS.cube.typical_load_port)
    assert seconds < timing.busy["MTE2"] < 1.25 * seconds  # what is read first comes from memory


def test_programs_run_on_cube_cores():
    one, two = (product(20 * 128 * rounds, 128, 512, (128, 128, 128), programs=20 * rounds) for rounds in (1, 2))
    launch = COSTS.launch + 20 * COSTS.launch_block
    assert two.estimate - launch == pytest.approx(2 * (one.estimate - launch) + COSTS.next_program, rel=0.1)


def test_toolchains_agree():
    timings = [product(640, 1024, 2048, (128, 128, 128), toolchain=version) for version in TOOLCHAINS]
    assert len({timing.moved for timing in timings}) == 1
    assert len({round(timing.busy["M"] * 1e12) for timing in timings}) == 1
    assert max(timing.estimate for timing in timings) < 1.2 * min(timing.estimate for timing in timings)


@pytest.mark.parametrize("toolchain", TOOLCHAINS)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_tiles_that_are_cut_off_leave_no_flag_behind(toolchain, dtype):
    m, n, k = 100, 72, 200
    a, b, c = torch.empty(m, k, dtype=dtype), torch.empty(k, n, dtype=dtype), torch.empty(m, n, dtype=dtype)
    tile = {"BM": 64, "BN": 64, "BK": 64}
    timing = timed(sample_kernels.matmul, (2, 2), a, b, c, m, n, k, **tile, toolchain=toolchain)
    assert timing.moved >= 2 * (m * k + k * n) * dtype.itemsize + m * n * dtype.itemsize
    assert timing.least == (m * k + k * n + m * n) * dtype.itemsize


@pytest.mark.parametrize("toolchain", TOOLCHAINS)
def test_cube_and_vector_cores_run_a_kernel_together(toolchain):
    timing = mixed(toolchain, events=100_000)
    assert {event.core for event in timing.events} == {"AIC", "AIV0", "AIV1"}
    products = [event for event in timing.events if event.pipe == "M"]
    exps = [event for event in timing.events if event.pipe == "V" and event.core == "AIV0" and "exp" in event.name]
    assert exps[0].end < products[0].start  # the first product takes what the vector cores computed
    assert products[-1].end < exps[-1].start  # the last results go through them once more
    assert timing.bound < timing.estimate


def test_toolchains_agree_on_a_kernel_of_both_kinds_of_cores():
    timings = [mixed(version) for version in TOOLCHAINS]
    assert max(timing.estimate for timing in timings) < 1.5 * min(timing.estimate for timing in timings)
    assert len({timing.least for timing in timings}) == 1


def test_the_halves_of_a_result_are_two_vector_cores_work():
    a, b, c = torch.empty(1280, 256, dtype=BF16), torch.empty(256, 64, dtype=BF16), torch.empty(1280, 64)
    timing = timed(timing_kernels.exp_of_matmul, (20,), a, b, c, 256, B=64)
    assert timing.busy["V"] == pytest.approx(
        (64 * 64 / 2 * 4 / 256 * 2 + 13 + 12) * COSTS.cycle
    )  # vexp: 2 cycles, its head and its latency
    assert timing.least == 2 * (1280 * 256 + 256 * 64) + 4 * 1280 * 64


def test_only_pipes_that_do_something_have_lanes():
    cube = product(128, 128, 256, (128, 128, 128), programs=1, events=1000)
    x = torch.empty(4096)
    vector = timed(timing_kernels.exp_often, (1,), x, torch.empty_like(x), BLOCK=4096, TIMES=2, events=1000)
    events = chrome_trace([cube, vector, mixed("1.2.0", events=1000)])["traceEvents"]
    lanes = [{e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == pid} for pid in range(3)]
    assert lanes[0] == {"MTE2", "MTE1", "M", "FIX"}
    assert lanes[1] == {"MTE2", "V", "MTE3"}
    assert lanes[2] > {"AIC M", "AIC FIX", "AIV0 V", "AIV1 V"}


def test_a_chip_of_whose_cube_cores_nothing_is_known_is_refused(monkeypatch):
    monkeypatch.setattr(model, "costs_of", lambda _: dataclasses.replace(COSTS, cube=None))
    with pytest.raises(UnsupportedError, match="cube cores' costs are known"):
        product(128, 128, 256, (128, 128, 128), programs=1)
    assert copied() > 0


def test_the_cost_of_single_instructions():
    assert cube_costs.product(128, 256, 64, 2, False) == (21 + 8 * 16 * 4, 8 * 16 * 4)
    assert cube_costs.product(100, 250, 60, 4, False)[1] == 2 * 7 * 16 * 8
    assert cube_costs.product(16, 16, 16, 4, True)[1] == 2
    assert cube_costs.drain(128, 256) == pytest.approx(128 * 4 * 256 / 118)
    assert cube_costs.drain(16, 80) == pytest.approx(16 * (4.45 + 4 * 2.6))
