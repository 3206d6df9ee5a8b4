"""The pipes' simulation, on traces short enough to time by hand, and what single vector instructions cost."""

import pytest
from npu_offline import OfflineError, UnsupportedError
from npu_offline.timing.cache import Cache
from npu_offline.timing.core import Rates
from npu_offline.timing.instructions import (
    WORKSPACE,
    Barrier,
    CubeStep,
    ScalarAccess,
    SetCrossFlag,
    SetFlag,
    Transfer,
    Vector,
    WaitCrossFlag,
    WaitFlag,
)
from npu_offline.timing.simulation import simulate
from npu_offline.timing.vector_costs import vector

START, LATENCY, SHARE = 10.0, 2.0, 4.0  # seconds, seconds, bytes a second; a cycle is a second
MEMORY = 3.0  # seconds, further, of bytes from main memory
SEEN = LATENCY + MEMORY
LOAD = Transfer("load", "MTE2", "x", 80, 80, False)  # alone: 10 to start, 20 to move, 5 until it is seen
STORE = Transfer("store", "MTE3", "y", 80, 80, False)  # alone: 10 to start, 20 to move, 2 until it is seen
DRAIN = Transfer("fixpipe", "FIX", "y", 80, 80, False, 40)  # its core's end takes 40
VECTOR = Vector("vadd", 64, 5, 3, 1)
COPY, PRODUCT = CubeStep("L1 to L0A", "MTE1", 64, 4, 1), CubeStep("product", "M", 64, 7, 6)
FILLED, FREED = ("MTE2", "MTE3"), ("MTE3", "MTE2")


def run_together(load_port=100.0, cache=None, **cores):
    rates = Rates(1.0, 0.0, START, LATENCY, MEMORY, {"MTE2": load_port, "MTE3": 4.0, "FIX": 100.0})

    def issues(items):
        return [item if isinstance(item, tuple) else (0, item, (number,)) for number, item in enumerate(items)]

    programs = {name: (issues(items), rates) for name, items in cores.items()}
    return simulate(programs, SHARE, cache or Cache(0, {}), 1000)


def run(*items, **options):
    return run_together(AIV=items, **options)


def test_a_transfer_takes_its_start_and_its_bytes_over_the_share_of_the_bandwidth():
    assert run(LOAD).seconds == START + 80 / SHARE + SEEN
    assert run(LOAD, LOAD).seconds == 2 * (START + 80 / SHARE) + SEEN  # the second does not wait until the first is seen


def test_a_transfer_of_no_bytes_takes_no_time():
    assert run(Transfer("load", "MTE2", "x", 0, 0, False), LOAD).seconds == run(LOAD).seconds


def test_a_port_slower_than_the_share_limits_a_transfer():
    assert run(LOAD, load_port=2.0).seconds == START + 80 / 2 + SEEN


def test_single_buffered_copies_take_the_sum():
    tile = (WaitFlag(*FREED, 0), LOAD, SetFlag(*FILLED, 0), WaitFlag(*FILLED, 0), STORE, SetFlag(*FREED, 0))
    outcome = run(SetFlag(*FREED, 0), *tile, *tile, *tile, WaitFlag(*FREED, 0))
    assert outcome.seconds == 3 * (35 + 32)


def test_double_buffered_copies_overlap():
    def tile(event):
        return (
            WaitFlag(*FREED, event),
            LOAD,
            SetFlag(*FILLED, event),
            WaitFlag(*FILLED, event),
            STORE,
            SetFlag(*FREED, event),
        )

    tiles = [item for number in range(4) for item in tile(number % 2)]
    # Loads follow each other until the third needs the buffer of the first store; the cache takes what is stored at once.
    outcome = run(SetFlag(*FREED, 0), SetFlag(*FREED, 1), *tiles, WaitFlag(*FREED, 0), WaitFlag(*FREED, 1))
    assert 35 + 4 * 30 < outcome.seconds < 4 * (35 + 32)
    assert (outcome.read, outcome.written) == (4 * 80, 4 * 80)


def test_two_loads_share_the_bandwidth_only_while_both_move_bytes():
    short = Transfer("load of AIV1", "MTE2", "x", 20, 20, False)
    outcome = run_together(AIC=[], AIV0=[LOAD], AIV1=[short])
    # Both move from 10 on at 2 a second; the short one has moved at 20, and 60 bytes of the other are left for 4 a second.
    assert [(event.name, event.end) for event in outcome.events] == [("load of AIV1", 20 + SEEN), ("load", 35 + SEEN)]


def test_main_memory_takes_what_is_stored_later_and_what_a_dirty_cache_gives_up():
    assert run(STORE).seconds == 32
    outcome = run(LOAD, STORE, cache=Cache(0, {}, dirty=0.5))
    assert (outcome.read, outcome.written) == (80, 80 + 40)


def test_a_warm_cache_gives_and_takes_everything():
    outcome = run(LOAD, STORE, cache=Cache(1000, {}, warm=True), load_port=8)
    assert {event.name: event.end for event in outcome.events} == {"load": START + 10 + LATENCY, "store": 32}
    assert outcome.read == outcome.written == 0


def test_an_address_that_all_cores_load_takes_longer_at_the_port():
    assert run(LOAD, cache=Cache(0, {"x": 0}, common={"x": 1.5}), load_port=8).seconds == START + 15 + LATENCY


def test_a_pipe_is_busy_while_one_of_its_instructions_is_under_way():
    assert run(LOAD, LOAD).busy["AIV"]["MTE2"] == 65
    assert run(VECTOR, Barrier("V"), VECTOR).busy["AIV"]["V"] == 16
    assert run(VECTOR, VECTOR).busy["AIV"]["V"] == 13


def test_a_flag_waits_for_all_that_its_source_was_issued_before():
    flag = ("MTE2", "V", 0)
    outcome = run(LOAD, SetFlag(*flag), WaitFlag(*flag), VECTOR)
    assert [event.start for event in outcome.events] == [0, 35]
    assert outcome.seconds == 35 + 5 + 3


def test_a_vector_instruction_hides_its_latency_unless_a_barrier_waits_for_it():
    assert run(VECTOR, VECTOR).seconds == 5 + 5 + 3
    assert run(VECTOR, Barrier("V"), VECTOR).seconds == 5 + 3 + 5 + 3


def test_a_full_barrier_holds_the_scalar_unit():
    outcome = run(VECTOR, Barrier(None), ScalarAccess("load", "x", 2, 4))
    assert outcome.seconds == 5 + 3 + 2


def test_what_the_scalar_unit_spends_comes_before_what_it_issues():
    outcome = run((7, VECTOR, None))
    assert outcome.events[0].start == 7
    assert outcome.busy["AIV"]["S"] == 7


def test_bytes_moved_while_the_scalar_unit_waits_are_not_moved_twice():
    flag = ("MTE2", "S", 0)
    outcome = run(LOAD, SetFlag(*flag), LOAD, WaitFlag(*flag), STORE)
    assert [(event.name, event.end) for event in outcome.events] == [("load", 35), ("load", 65), ("store", 35 + 32)]


def test_a_flag_that_nothing_sets_is_an_error():
    with pytest.raises(OfflineError, match="V of AIV waits for .* which nothing sets"):
        run(WaitFlag("MTE2", "V", 0), VECTOR)
    with pytest.raises(OfflineError, match="the scalar unit of AIC waits for .* which nothing sets"):
        run_together(AIC=[WaitCrossFlag(3)], AIV0=[SetCrossFlag("MTE3", 3)], AIV1=[])


def test_a_flag_that_nothing_waits_for_is_an_error():
    with pytest.raises(OfflineError, match="MTE2 of AIV sets flag 0 for V, which nothing waits for"):
        run(LOAD, SetFlag("MTE2", "V", 0))
    with pytest.raises(OfflineError, match="AIC sets flag 3 for AIV1, which nothing waits for"):
        run_together(AIC=[SetCrossFlag("FIX", 3)], AIV0=[WaitCrossFlag(3)], AIV1=[])


def test_memory_read_again_comes_from_the_cache_while_it_is_there():
    again = [(0, LOAD, (1,)), (0, LOAD, (2,)), (0, LOAD, (1,))]
    large, small = Cache(1000, {}), Cache(100, {})
    assert run(*again, cache=large, load_port=8).seconds == 30 + 30 + START + 80 / 8 + LATENCY
    assert run(*again, cache=small, load_port=8).seconds == 90 + SEEN


def test_what_other_cores_read_too_comes_from_memory_once():
    assert run(LOAD, cache=Cache(0, {"x": 0.25}), load_port=8).seconds == START + 20 / SHARE + 60 / 8 + LATENCY + MEMORY / 4


def test_what_comes_from_the_cache_takes_nothing_from_the_bandwidth_of_memory():
    held = Transfer("load of AIV1", "MTE2", "y", 80, 80, False)
    outcome = run_together(cache=Cache(0, {"y": 0}), load_port=8, AIC=[], AIV0=[LOAD], AIV1=[held])
    assert {event.name: event.end for event in outcome.events} == {"load": 30 + SEEN, "load of AIV1": 20 + LATENCY}


def test_a_drain_is_no_faster_than_its_core_can_take_results():
    assert run_together(AIC=[DRAIN]).seconds == START + 40 + LATENCY


def test_a_product_follows_its_operands_and_overlaps_the_next_ones():
    filled, freed = ("MTE1", "M"), ("M", "MTE1")

    def part(half):
        return (
            WaitFlag(*freed, half),
            COPY,
            SetFlag(*filled, half),
            WaitFlag(*filled, half),
            PRODUCT,
            SetFlag(*freed, half),
        )

    halves = [SetFlag(*freed, 0), SetFlag(*freed, 1)]
    outcome = run_together(AIC=[*halves, *part(0), *part(1), *part(0), WaitFlag(*freed, 0), WaitFlag(*freed, 1)])
    # The first copy is alone. The third waits for the first product, until 11, and is done before the second one.
    assert [event.start for event in outcome.events if event.pipe == "M"] == [4, 11, 18]
    assert [event.start for event in outcome.events if event.pipe == "MTE1"] == [0, 4, 11]
    assert outcome.seconds == 4 + 3 * 7


def test_a_vector_core_waits_for_the_cube_core_and_the_cube_core_for_both():
    cube = [PRODUCT, SetCrossFlag("M", 0), WaitCrossFlag(1), PRODUCT]
    vector = [WaitCrossFlag(0), VECTOR, SetCrossFlag("V", 1)]
    outcome = run_together(AIC=cube, AIV0=vector, AIV1=[vector[0], VECTOR, *vector[1:]])
    assert [(event.core, event.start) for event in outcome.events] == [
        ("AIC", 0),
        ("AIV0", 7),
        ("AIV1", 7),
        ("AIV1", 15),  # issued at 12, while the one before is under way
        ("AIC", 20),
    ]


def test_cores_of_a_group_share_its_bandwidth():
    assert run_together(AIC=[], AIV0=[LOAD], AIV1=[LOAD]).seconds == START + 160 / SHARE + SEEN


def test_what_cores_hand_to_each_other_stays_in_the_cache():
    handed = Transfer("store", "MTE3", WORKSPACE, 80, 80, False)
    assert run(handed).written == 0


def test_every_row_of_a_vector_instruction_takes_whole_repeats():
    flat, rows = (vector("vadd_2d_float", shape, 4, None, 13) for shape in ((640,), (10, 64)))
    assert flat.busy == rows.busy == pytest.approx(10 * 2.07)
    assert vector("vadd_2d_float", (64, 10), 4, None, 13).busy == pytest.approx(64 * 2.07)
    assert vector("vadds_vs_1d_float", (640,), 4, None, 13).busy == pytest.approx(10)
    assert flat.peak == 10
    assert flat.latency == 13 + 5.9


def test_a_row_reduction_adds_halves_and_then_sums_64_lanes():
    name = "enablevc_reduce_sum_ar_float"
    cost = vector(name, (2, 256), 4, (1,), 13)
    assert cost.busy == pytest.approx(2 * 3 * 2.07 + 2 * (13 + 5.9) + 2 * 7)
    over_rows = vector("reduce_sum_ra_float", (8, 64), 4, (0,), 13)
    assert over_rows.busy == pytest.approx(7 * 2.07)


def test_an_instruction_without_a_cost_is_refused():
    with pytest.raises(UnsupportedError, match="vhash_1d_float"):
        vector("vhash_1d_float", (64,), 4, None, 13)


def test_a_sort_merges_four_lists_at_a_time():
    cost = vector("sort_1d_float", (2048,), 4, None, 13)
    assert cost.busy == 4 * 64 + 2 * 2048 * 3 + 14 * 64
