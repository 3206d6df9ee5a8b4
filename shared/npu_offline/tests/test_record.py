"""What a record of launches holds, and which of them run: those that write integers, which later launches may depend on."""

import npu_offline
import pytest
import torch
import triton
import triton.language as tl
from npu_offline.toolchain.triton_ascend import missing_triton_ascend
from sample_kernels import cast, running_sum

pytestmark = pytest.mark.skipif(
    missing_triton_ascend() is not None or not npu_offline.installed(), reason="needs triton-ascend and a toolchain"
)


@triton.jit
def write_offsets(p_length, p_offsets, n):
    """offsets[i + 1] = the sum of length[0] to length[i], int32 [n]."""
    total = tl.load(p_length) * 0
    for i in tl.range(0, n):
        total += tl.load(p_length + i)
        tl.store(p_offsets + i + 1, total)


@triton.jit
def add_one(p_number):
    tl.store(p_number, tl.load(p_number) + 1)


def values(launch, name):
    return launch.arguments[name].values


def test_a_launch_that_writes_integers_runs_and_a_later_one_has_them():
    length, offsets, later = torch.tensor([3, 1, 4, 1], dtype=torch.int32), torch.zeros(5, dtype=torch.int32), torch.zeros(5)
    with npu_offline.record("Ascend910B4") as launches:
        write_offsets[(1,)](length, offsets, 4)
        write_offsets[(1,)](offsets, torch.zeros(6, dtype=torch.int32), 5)
        cast[(1,)](later, torch.zeros(5, dtype=torch.bfloat16), BN=1)
    assert [launch.name for launch in launches] == ["write_offsets", "write_offsets", "cast"]
    assert values(launches[1], "p_length").tolist() == [0, 3, 4, 8, 9]


def test_a_record_has_the_integers_from_before_its_launch():
    number = torch.zeros(1, dtype=torch.int32)
    with npu_offline.record("Ascend910B4") as launches:
        for _ in range(3):
            add_one[(1,)](number)
    assert [values(launch, "p_number").item() for launch in launches] == [0, 1, 2]
    assert number.item() == 3


def test_launches_that_write_no_integers_do_not_run():
    x, y = torch.ones(16), torch.full((16,), 2.0, dtype=torch.bfloat16)
    with npu_offline.record("Ascend910B4") as launches:
        cast[(1,)](x, y, BN=16)
    assert len(launches) == 1
    assert (y == 2.0).all()


def test_integers_of_more_than_4_mib_are_not_kept_and_not_written():
    length, offsets = torch.ones(2, dtype=torch.int32), torch.zeros(2**20 + 1, dtype=torch.int32)
    with npu_offline.record("Ascend910B4") as launches:
        write_offsets[(1,)](length, offsets, 2)
    assert values(launches[0], "p_offsets") is None
    assert values(launches[0], "p_length").tolist() == [1, 1]
    assert not offsets.any()


def test_a_launch_that_writes_a_scan_of_integers_runs():
    x, y = torch.ones(16, dtype=torch.int32), torch.full((16,), 7, dtype=torch.int32)
    with npu_offline.record("Ascend910B4") as launches:
        running_sum[(1,)](x, y, BN=16)  # a scan
    assert [launch.name for launch in launches] == ["running_sum"]
    assert torch.equal(y, torch.arange(1, 17, dtype=torch.int32))
