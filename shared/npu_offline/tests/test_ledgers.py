"""What a launch's ledgers say of how arguments are used: distinct bytes, pieces, lengths of transfers."""

import pytest
import torch
import triton
import triton.language as tl
from npu_offline import Ledger, Traffic, emulate


@triton.jit
def sum_twice(x_ptr, y_ptr, n, pitch, D: tl.constexpr, BM: tl.constexpr):
    o_rows = tl.program_id(0) * BM + tl.arange(0, BM)
    o = o_rows[:, None] * pitch + tl.arange(0, D)[None, :]
    b_sum = tl.zeros([BM], tl.float32)
    for _ in range(2):
        b_sum += tl.sum(tl.load(x_ptr + o, mask=o_rows[:, None] < n, other=0.0).to(tl.float32), 1)
    tl.store(y_ptr + o_rows, b_sum, mask=o_rows < n)


@triton.jit
def add_at(index_ptr, x_ptr, table_ptr, D: tl.constexpr):
    i = tl.program_id(0)
    i_row = tl.load(index_ptr + i)
    tl.atomic_add(table_ptr + i_row * D + tl.arange(0, D), tl.load(x_ptr + i * D + tl.arange(0, D)))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_is_read_twice_is_useful_once(threads, dtype):
    wide = torch.randn(10, 96).to(dtype)
    x, y = wide[:, 16:80], torch.empty(10, dtype=torch.float32)
    with emulate(threads=threads, ledgers=True) as emulation:
        sum_twice[(3,)](x, y, 10, 96, D=64, BM=4)
    launch = emulation.launches[0]
    row = 64 * dtype.itemsize
    assert launch.arguments["x_ptr"] == Traffic(read=2 * 10 * row, transfers=6)
    assert launch.ledgers["x_ptr"] == Ledger(
        useful_read=10 * row, useful_written=0, pieces=20, whole_rows=6, lengths={4 * row: 4, 2 * row: 2}
    )
    assert launch.ledgers["y_ptr"] == Ledger(useful_read=0, useful_written=40, pieces=3, whole_rows=0, lengths={16: 2, 8: 1})


def test_atomic_updates_are_written_and_repeats_are_useful_once():
    index, x, table = torch.tensor([1, 1, 3]), torch.ones(3, 48), torch.zeros(5, 48)
    with emulate(ledgers=True) as emulation:
        add_at[(3,)](index, x, table, D=48)
    launch = emulation.launches[0]
    assert launch.arguments["table_ptr"].written == 3 * 192
    assert launch.ledgers["table_ptr"] == Ledger(0, 2 * 192, pieces=3, whole_rows=3, lengths={128: 3})
    assert launch.ledgers["index_ptr"] == Ledger(24, 0, pieces=0, whole_rows=0, lengths={})


def test_arguments_in_one_storage_have_ledgers_of_their_own():
    both = torch.randn(2, 64)
    with emulate(ledgers=True) as emulation:
        sum_twice[(1,)](both, both[1], 1, 64, D=64, BM=1)
    ledgers = emulation.launches[0].ledgers
    assert (ledgers["x_ptr"].useful_read, ledgers["x_ptr"].useful_written) == (256, 0)
    assert (ledgers["y_ptr"].useful_read, ledgers["y_ptr"].useful_written) == (0, 4)


def test_ledgers_and_races_can_be_watched_together():
    index, x, table = torch.tensor([1, 1, 3]), torch.ones(3, 48), torch.zeros(5, 48)
    with emulate(ledgers=True, races=True) as emulation:
        add_at[(3,)](index, x, table, D=48)
    assert emulation.launches[0].ledgers["x_ptr"].useful_read == 3 * 192
