"""Locks that programs take turns by: what the compilers make of atomic updates whose old values are used."""

import npu_offline
import pytest
import torch
import triton
import triton.language as tl
from fault_kernels import unlocked_exchange_kernel
from npu_offline import FindingsError, emulate
from npu_offline.module.mlir import name_of, symbol_of

REASON = "needs triton-ascend and the three toolchains (npu-offline fetch)"
pytestmark = [pytest.mark.compilers, pytest.mark.skipif(len(npu_offline.installed()) < 3, reason=REASON)]


def exchange(toolchain, mutate=None):
    x, y = torch.zeros(64), torch.arange(4.0).repeat_interleave(64).view(4, 64) + 1
    with emulate(toolchain=toolchain, checks=True, mutate=mutate):
        unlocked_exchange_kernel[(4,)](x, y, BLOCK=64, ONE=False)
    return x[0].item(), y[:, 0].tolist()


def locks(module, verb):
    """The operations that take a lock, or release it."""
    name = f"sync_block_{verb}"
    return [op for op in module.walk() if name_of(op) == f"hivm.hir.{name}" or symbol_of(op, "callee") == name]


@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_programs_with_a_lock_run_one_after_another(toolchain):
    assert exchange(toolchain) == (4.0, [0.0, 1.0, 2.0, 3.0])


@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_a_lock_that_a_program_takes_twice_is_a_finding(toolchain):
    """The library's lock counts programs: the second time it waits for ever."""

    def mutate(module):
        (taken,), (released,) = locks(module, "lock"), locks(module, "unlock")
        again = taken.clone({operand: operand for operand in taken.operands})
        released.parent_block().insert_ops_after([again, released.clone()], released)

    with pytest.raises(FindingsError, match=r"deadlock: sync_block_lock#\d+ takes lock 0 a second time in one program"):
        exchange(toolchain, mutate)


@pytest.mark.parametrize(
    ("verb", "said"),
    [
        ("unlock", "deadlock: the program ends and holds a lock, for which the next program waits"),
        ("lock", r"sync_block_unlock#\d+: the program does not hold lock 0"),
    ],
)
def test_a_lock_without_its_other_half_is_a_finding(verb, said):
    def mutate(module):
        (op,) = locks(module, verb)
        op.detach()

    with pytest.raises(FindingsError, match=said):
        exchange("1.2.0", mutate)


@triton.jit
def odd_exchange_kernel(p_x, p_y, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    o_lane = tl.arange(0, BLOCK)
    if tl.program_id(0) % 2 == FIRST:
        p_row = p_y + tl.program_id(0) * BLOCK + o_lane
        tl.store(p_row, tl.atomic_xchg(p_x + o_lane, tl.load(p_row)))


@pytest.mark.parametrize("options", [{"final": True}, {"checks": True}, {"checks": True, "distinct": True}], ids=str)
def test_a_lock_that_a_program_before_another_does_not_take_is_a_finding(options):
    with emulate(toolchain="1.2.0", **options):
        odd_exchange_kernel[(1,)](torch.zeros(64), torch.ones(64), FIRST=0, BLOCK=64)
        with pytest.raises(FindingsError, match="deadlock: 2 of the programs up to number 3 take lock 0"):
            odd_exchange_kernel[(4,)](torch.zeros(64), torch.ones(4, 64), FIRST=1, BLOCK=64)


@pytest.mark.parametrize("options", [{"final": True}, {"checks": True}, {"checks": True, "distinct": True}], ids=str)
def test_1_1_0_releases_the_lock_of_a_program_that_does_not_take_it(options):
    x, y = torch.zeros(64), torch.ones(4, 64)
    with emulate(toolchain="1.1.0", **options):
        odd_exchange_kernel[(4,)](x, y, FIRST=1, BLOCK=64)
    assert y[:, 0].tolist() == ([1, 1, 1, 0] if "distinct" in options else [1, 0, 1, 1])  # of those the last one alone


@triton.jit
def tickets_kernel(p_x, p_y):
    """Program (i, j, k) of the grid takes a number."""
    i, n_j, j, n_k, k = tl.program_id(0), tl.num_programs(1), tl.program_id(1), tl.num_programs(2), tl.program_id(2)
    tl.store(p_y + (i * n_j + j) * n_k + k, tl.atomic_add(p_x, 1))


@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize("shuffle", [None, 1])
def test_programs_take_a_lock_in_the_order_of_the_chips_numbers(shuffle, threads):
    x, y = torch.zeros(1, dtype=torch.int32), torch.zeros(2, 3, 4, dtype=torch.int32)
    for _ in range(20):
        with emulate(toolchain="1.2.0", final=True, threads=threads, shuffle=shuffle):
            tickets_kernel[(2, 3, 4)](x.zero_(), y)
        assert torch.equal(y.flatten(), torch.arange(24, dtype=torch.int32))
