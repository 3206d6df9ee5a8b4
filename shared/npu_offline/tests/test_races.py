"""Programs of one launch that get in each other's way are found, in whichever order they happen to run."""

import pytest
import torch
import triton
import triton.language as tl
from npu_offline import OfflineError, RaceError, emulate

# Program order in one thread is the hardest to find anything in: nothing happens at once.
ORDERS = [{"threads": 1}, {"threads": 1, "shuffle": 5}, {"threads": 2}]


@triton.jit
def shift(x_ptr, y_ptr, n, OFFSET: tl.constexpr, BN: tl.constexpr):
    o = tl.program_id(0) * BN + tl.arange(0, BN)
    tl.store(y_ptr + o + OFFSET, tl.load(x_ptr + o, mask=o < n, other=0.0), mask=o < n)


@triton.jit
def total(x_ptr, y_ptr, ATOMIC: tl.constexpr, BN: tl.constexpr):
    o = tl.arange(0, BN)
    b_x = tl.load(x_ptr + tl.program_id(0) * BN + o)
    if ATOMIC:
        tl.atomic_add(y_ptr + o, b_x)
    else:
        tl.store(y_ptr + o, tl.load(y_ptr + o) + b_x)


@triton.jit
def total_and_look(x_ptr, y_ptr, z_ptr, BN: tl.constexpr):
    o = tl.arange(0, BN)
    tl.atomic_add(y_ptr + o, tl.load(x_ptr + tl.program_id(0) * BN + o))
    tl.store(z_ptr + tl.program_id(0) * BN + o, tl.load(y_ptr + o))


@triton.jit
def count(y_ptr, ATOMIC: tl.constexpr):
    if ATOMIC:
        tl.atomic_add(y_ptr, 1)
    else:
        tl.store(y_ptr, tl.load(y_ptr) + 1)


@triton.jit
def columns(x_ptr, y_ptr, n_rows, pitch, D: tl.constexpr, BM: tl.constexpr):
    o_rows = tl.arange(0, BM)
    o = o_rows[:, None] * pitch + tl.program_id(0) * D + tl.arange(0, D)[None, :]
    tl.store(y_ptr + o, tl.load(x_ptr + o, mask=o_rows[:, None] < n_rows), mask=o_rows[:, None] < n_rows)


@triton.jit
def keep_positive(x_ptr, y_ptr, STEP: tl.constexpr, BN: tl.constexpr):
    o = tl.program_id(0) * STEP + tl.arange(0, BN)
    b_x = tl.load(x_ptr + o)
    tl.store(y_ptr + o, b_x, mask=b_x > 0)


@pytest.mark.parametrize("order", ORDERS)
def test_two_programs_that_write_one_address_are_found(order):
    x, y = torch.ones(32), torch.zeros(32)
    with (
        emulate(races=True, **order),
        pytest.raises(RaceError, match=r"total.*y_ptr.*, which (other )?programs? .*(read|wrote)"),
    ):
        total[(4,)](x, y, ATOMIC=False, BN=8)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("offset", [0, 3])
def test_a_program_that_reads_what_another_writes_is_found(order, offset):
    x = torch.ones(64)
    expected = pytest.raises(RaceError, match="argument [xy]_ptr .in one storage with [xy]_ptr") if offset else emulate()
    with emulate(races=True, **order), expected:
        shift[(3,)](x, x, 48, OFFSET=offset, BN=16)


def test_the_message_names_kernel_programs_argument_and_byte():
    x = torch.ones(64)
    line = shift.fn.__code__.co_firstlineno + 3
    message = (
        r"kernel shift, program \(1, 0, 0\): read of 4 bytes at byte 64 of argument x_ptr \(in one storage with y_ptr\) "
        rf"\(test_races.py:{line}:\d+\), which program \(0, 0, 0\) wrote"
    )
    with emulate(races=True, threads=1), pytest.raises(RaceError, match=message):
        shift[(3,)](x, x, 48, OFFSET=3, BN=16)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kernel", ["tile", "scalar"])
def test_atomic_updates_of_one_address_are_no_race(order, kernel):
    y = torch.zeros(8)
    with emulate(races=True, **order):
        if kernel == "tile":
            total[(4,)](torch.ones(32), y, ATOMIC=True, BN=8)
        else:
            count[(4,)](y, ATOMIC=True)
    assert y[0] == 4


@pytest.mark.parametrize("order", ORDERS)
def test_a_plain_read_of_what_another_program_updates_is_found(order):
    with (
        emulate(races=True, **order),
        pytest.raises(RaceError, match=r"total_and_look.*argument y_ptr.*, which .*program"),
    ):
        total_and_look[(4,)](torch.ones(32), torch.zeros(8), torch.zeros(32), BN=8)


@triton.jit
def look_and_count(y_ptr, z_ptr, BN: tl.constexpr):
    o = tl.arange(0, BN)
    b_y = tl.load(y_ptr + o)
    tl.atomic_add(y_ptr + o, tl.full([BN], 1.0, tl.float32))
    tl.store(z_ptr + tl.program_id(0) * BN + o, b_y)


def test_a_plain_read_before_an_update_is_found():
    with emulate(races=True), pytest.raises(RaceError, match="look_and_count.*argument y_ptr"):
        look_and_count[(4,)](torch.zeros(8), torch.zeros(32), BN=8)


def test_one_program_may_do_what_it_likes():
    x, y, z = torch.ones(8), torch.zeros(8), torch.zeros(8)
    with emulate(races=True):
        total_and_look[(1,)](x, y, z, BN=8)
        total[(1,)](x, y, ATOMIC=False, BN=8)
        count[(1,)](y, ATOMIC=False)


def test_scalar_accesses_are_watched():
    with emulate(races=True, threads=1), pytest.raises(RaceError, match=r"program \(1, 0, 0\): read of 4 bytes at byte 0"):
        count[(2,)](torch.zeros(1, dtype=torch.int32), ATOMIC=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_neighbouring_elements_and_interleaved_columns_are_no_race(dtype):
    """Tiles of 3 columns, in rows 9 apart: any granularity coarser than an element would see them overlap."""
    x, y = torch.ones(8, 9).to(dtype), torch.zeros(8, 9, dtype=dtype)
    with emulate(races=True):
        columns[(3,)](x, y, 8, 9, D=3, BM=8)
    assert torch.equal(x, y)


def test_overlapping_columns_are_found_by_the_first_shared_element():
    x = torch.ones(8, 10)
    with emulate(races=True, threads=1), pytest.raises(RaceError, match=r"write of 4 bytes at byte 16 of argument y_ptr"):
        columns[(3,)](x, torch.zeros(8, 10), 4, 2, D=4, BM=4)


def test_a_masked_store_that_became_a_rewrite_of_its_tile_is_found():
    """Tiles overlap by half, and each program's mask leaves that half alone: the compiler stores all of it all the same."""
    x = torch.tensor([-1.0] * 8 + [1.0] * 8 + [-1.0] * 8)
    with emulate(races=True, threads=1), pytest.raises(RaceError, match="keep_positive"):
        keep_positive[(2,)](x, torch.zeros(24), STEP=8, BN=16)


def test_nothing_is_watched_unless_asked_for():
    y = torch.zeros(8)
    with emulate(threads=1) as emulation:
        total[(4,)](torch.ones(32), y, ATOMIC=False, BN=8)
    assert torch.equal(y, torch.full((8,), 4.0))
    assert not emulation.launches[0].ledgers


def test_each_launch_starts_afresh():
    x = torch.ones(8)
    with emulate(races=True, threads=1):
        for _ in range(3):
            shift[(2,)](x, x, 8, OFFSET=0, BN=4)
            total[(1,)](x, x, ATOMIC=False, BN=8)


@triton.jit
def last_columns(x_ptr, y_ptr, z_ptr, STEP: tl.constexpr, LOOK: tl.constexpr, BN: tl.constexpr):
    # races: allow y_ptr: tiles that overlap hold the same values there
    o = tl.program_id(0) * STEP + tl.arange(0, BN)
    b_x = tl.load(x_ptr + o)
    tl.store(y_ptr + o, b_x)
    if LOOK:
        tl.store(z_ptr + tl.program_id(0) * BN + tl.arange(0, BN), tl.load(y_ptr + tl.arange(0, BN)))


@pytest.mark.parametrize("order", ORDERS)
def test_an_argument_that_its_kernel_says_is_written_alike_may_be_but_not_read(order):
    x, y, z = torch.randn(16), torch.zeros(16), torch.zeros(16)
    with emulate(races=True, **order):
        last_columns[(2,)](x, y, z, STEP=4, LOOK=False, BN=8)
        assert torch.equal(y[:12], x[:12])
        with pytest.raises(RaceError, match="last_columns.*argument y_ptr"):
            last_columns[(2,)](x, y, z, STEP=4, LOOK=True, BN=8)


@triton.jit
def suppresses_nothing(x_ptr, BN: tl.constexpr):
    # races: allow y_ptr: there is none
    tl.store(x_ptr + tl.arange(0, BN), tl.zeros([BN], tl.float32))


def test_a_suppression_of_an_unknown_argument_is_an_error():
    with emulate(races=True), pytest.raises(OfflineError, match="must be of an argument of the kernel"):
        suppresses_nothing[(1,)](torch.zeros(8), BN=8)
