"""Global memory traffic is counted exactly, per argument, whichever way the compiler makes a kernel access it."""

import pytest
import torch
import triton
import triton.language as tl
from npu_offline import Traffic, emulate


@triton.jit
def scale_rows(x_ptr, w_ptr, y_ptr, n_rows, stride, D: tl.constexpr, BM: tl.constexpr):
    o_cols = tl.arange(0, D)  # [D]
    b_w = tl.load(w_ptr + o_cols).to(tl.float32)  # [D]
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, BM), tl.num_programs(0)):
        o_rows = i_tile * BM + tl.arange(0, BM)  # [BM]
        m_rows = o_rows[:, None] < n_rows
        b_x = tl.load(x_ptr + o_rows[:, None] * stride + o_cols[None, :], mask=m_rows, other=0.0)  # [BM, D]
        b_y = b_x.to(tl.float32) * b_w[None, :]
        tl.store(y_ptr + o_rows[:, None] * D + o_cols[None, :], b_y.to(y_ptr.dtype.element_ty), mask=m_rows)


@triton.jit
def sum_columns_tiled(x_ptr, y_ptr, D, BN: tl.constexpr):
    i_row = tl.program_id(0)
    b_sum = tl.zeros([BN], tl.float32)  # [BN]
    for i_col in range(0, D, BN):
        o_cols = i_col + tl.arange(0, BN)
        b_sum += tl.load(x_ptr + i_row * D + o_cols, mask=o_cols < D, other=0.0)
    tl.store(y_ptr + i_row, tl.sum(b_sum, 0))


@triton.jit
def gather_rows(index_ptr, table_ptr, y_ptr, n, D: tl.constexpr, BM: tl.constexpr):
    o_rows = tl.program_id(0) * BM + tl.arange(0, BM)  # [BM]
    o_cols = tl.arange(0, D)  # [D]
    b_index = tl.load(index_ptr + o_rows, mask=o_rows < n, other=0)
    b_rows = tl.load(table_ptr + b_index[:, None] * D + o_cols[None, :])  # [BM, D]
    tl.store(y_ptr + o_rows[:, None] * D + o_cols[None, :], b_rows, mask=o_rows[:, None] < n)


@triton.jit
def gather_elements(index_ptr, table_ptr, y_ptr, BN: tl.constexpr):
    o = tl.arange(0, BN)
    tl.store(y_ptr + o, tl.load(table_ptr + tl.load(index_ptr + o)))


@triton.jit
def scatter_add(index_ptr, g_ptr, table_ptr, n, D: tl.constexpr):
    o_cols = tl.arange(0, D)
    for i in tl.range(tl.program_id(0), n, tl.num_programs(0)):
        i_row = tl.load(index_ptr + i)
        tl.atomic_add(table_ptr + i_row * D + o_cols, tl.load(g_ptr + i * D + o_cols))


@triton.jit
def scalar_copy(x_ptr, y_ptr, flag):
    i = tl.program_id(0)
    x = tl.load(x_ptr + i)
    if flag:
        tl.store(y_ptr + i, x)


@triton.jit
def store_where_positive(x_ptr, y_ptr, BN: tl.constexpr):
    o = tl.arange(0, BN)
    b_x = tl.load(x_ptr + o)
    tl.store(y_ptr + o, b_x, mask=b_x > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masked_tail_and_strided_rows_count_what_is_inside(dtype):
    wide = torch.randn(13, 200).to(dtype)
    x, w, y = wide[:, 20:120], torch.randn(100).to(dtype), torch.empty(13, 100, dtype=dtype)
    with emulate() as emulation:
        scale_rows[(5,)](x, w, y, 13, 200, D=100, BM=4)
    torch.testing.assert_close(y, (x.float() * w.float()).to(dtype), rtol=0, atol=0)
    counted = emulation.launches[0].arguments
    size = dtype.itemsize
    assert counted["x_ptr"] == Traffic(read=13 * 100 * size, transfers=4)
    assert counted["w_ptr"] == Traffic(read=5 * 100 * size, transfers=5)
    assert counted["y_ptr"] == Traffic(written=13 * 100 * size, transfers=4)


def test_column_tiles_count_the_row_once():
    x, y = torch.randn(3, 100), torch.empty(3)
    with emulate() as emulation:
        sum_columns_tiled[(3,)](x, y, 100, BN=32)
    torch.testing.assert_close(y, x.sum(1))
    counted = emulation.launches[0].arguments
    assert counted["x_ptr"] == Traffic(read=3 * 100 * 4, transfers=3 * 4)
    assert counted["y_ptr"].written == 3 * 4


def test_gathered_rows_are_one_transfer_each():
    index, table, y = torch.tensor([3, 0, 3, 7, 1]), torch.randn(8, 48).bfloat16(), torch.empty(5, 48).bfloat16()
    with emulate() as emulation:
        gather_rows[(2,)](index, table, y, 5, D=48, BM=4)
    torch.testing.assert_close(y, table[index], rtol=0, atol=0)
    counted = emulation.launches[0].arguments
    assert counted["index_ptr"] == Traffic(read=5 * 8, transfers=2)
    assert counted["table_ptr"] == Traffic(read=8 * 48 * 2, transfers=8)  # the three rows of padding read row 0
    assert counted["y_ptr"] == Traffic(written=5 * 48 * 2, transfers=2)


def test_gathered_elements_are_scalar_accesses():
    index, table, y = torch.randperm(16, dtype=torch.int32), torch.randn(16), torch.empty(16)
    with emulate() as emulation:
        gather_elements[(1,)](index, table, y, BN=16)
    torch.testing.assert_close(y, table[index.long()], rtol=0, atol=0)
    assert emulation.launches[0].arguments["table_ptr"] == Traffic(read=16 * 4, scalars=16)


@pytest.mark.parametrize("threads", [1, 8])
def test_atomic_rows_are_one_write_each_and_lose_no_update(threads):
    n, D = 4000, 2048  # long rows, all to one place: threads would collide
    index, g, table = torch.zeros(n, dtype=torch.int64), torch.ones(n, D), torch.zeros(2, D)
    with emulate(threads=threads) as emulation:
        scatter_add[(40,)](index, g, table, n, D=D)
    assert torch.equal(table, torch.tensor([[n], [0]]).float().expand(2, D))
    counted = emulation.launches[0].arguments
    assert counted["table_ptr"] == Traffic(written=n * D * 4, transfers=n, atomics=n)
    assert counted["index_ptr"] == Traffic(read=n * 8, scalars=n)
    assert counted["g_ptr"] == Traffic(read=n * D * 4, transfers=n)


@pytest.mark.parametrize("flag", [True, False])
def test_scalar_loads_and_stores(flag):
    x, y = torch.randn(6), torch.zeros(6)
    with emulate() as emulation:
        scalar_copy[(6,)](x, y, flag)
    torch.testing.assert_close(y, x if flag else torch.zeros(6), rtol=0, atol=0)
    counted = emulation.launches[0].arguments
    assert counted["x_ptr"] == Traffic(read=24, scalars=6)
    assert counted["y_ptr"].written == (24 if flag else 0)


def test_store_masked_by_data_reads_its_destination():
    x, y = torch.randn(64), torch.zeros(64)
    with emulate() as emulation:
        store_where_positive[(1,)](x, y, BN=64)
    torch.testing.assert_close(y, x.clamp(min=0), rtol=0, atol=0)
    assert emulation.launches[0].arguments["y_ptr"] == Traffic(read=256, written=256, transfers=2)


def test_arguments_in_one_storage_are_told_apart():
    both = torch.randn(2, 64)
    with emulate() as emulation:
        store_where_positive[(1,)](both[0], both[1], BN=64)
        store_where_positive[(1,)](both[0], both[0], BN=64)
    first, second = (launch.arguments for launch in emulation.launches)
    assert first["x_ptr"] == second["x_ptr"] == Traffic(read=256, transfers=1)
    assert first["y_ptr"] == second["y_ptr"]


def test_traffic_sums_launches_by_kernel():
    x, y = torch.randn(3, 100), torch.empty(3)
    with emulate() as emulation:
        sum_columns_tiled[(3,)](x, y, 100, BN=32)
        sum_columns_tiled[(1,)](x, y, 100, BN=32)
    assert emulation.traffic()["sum_columns_tiled"]["x_ptr"] == Traffic(read=4 * 400, transfers=16)
