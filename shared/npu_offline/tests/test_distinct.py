"""Which programs of a launch are executed with checks: those that do something that no program before them does."""

import pytest
import sample_kernels
import torch
import triton
import triton.language as tl
from npu_offline import FindingsError, OfflineError, OutOfBoundsError, emulate
from npu_offline.module.mlir import name_of

TOOLCHAINS = ("1.0.0", "1.1.0", "1.2.0")
TAIL = 1  # of four programs: rows 36, the last one, is the tenth tile of four rows


def rms_norm():
    x, w, y = torch.randn(37, 96), torch.randn(96), torch.full((37, 96), float("nan"))
    sample_kernels.rms_norm[(4,)](x, w, y, 37, 1e-5, D=96, BM=4)


@triton.jit
def far_kernel(x_ptr, y_ptr, FAR: tl.constexpr):
    o = tl.arange(0, 64)
    i = tl.program_id(0)
    tl.store(y_ptr + i * 64 + (i // 2) * (1 - i // 3) * FAR + o, tl.load(x_ptr + i * 64 + o))


@triton.jit
def steered_kernel(x_ptr, y_ptr):
    o = tl.arange(0, 64)
    i = tl.program_id(0)
    b_x = tl.load(x_ptr + i * 64 + o)
    if tl.max(b_x, 0) > 100.0:
        b_x = tl.exp(b_x - tl.max(b_x, 0))
    tl.store(y_ptr + i * 64 + o, b_x)


@triton.jit
def read_only_kernel(counts_ptr, x_ptr, y_ptr):
    o = tl.arange(0, 64)
    i = tl.program_id(0)
    n = tl.load(counts_ptr + i)
    tl.store(y_ptr + i * 64 + o, tl.load(x_ptr + i * 64 + o, mask=o < n, other=0.0) * 2.0, mask=o < n)


@pytest.mark.parametrize("toolchain", TOOLCHAINS)
def test_a_program_with_the_partial_tile_runs_wherever_it_is(toolchain):
    with emulate(toolchain=toolchain, checks=True, distinct=True) as emulation:
        rms_norm()
    assert emulation.launches[0].programs == (0, TAIL, 3)


@pytest.mark.parametrize("toolchain", ["1.1.0", "1.2.0"])  # 1.0.0 has no flags in the branch
def test_a_defect_in_the_branch_of_the_partial_tile_is_found_in_a_program_in_between(toolchain):
    def mutate(module):
        for op in list(module.walk()):
            inside = name_of(op.parent_op()) == "scf.if" if op.parent_op() is not None else False
            if inside and name_of(op) in ("hivm.hir.set_flag", "hivm.hir.wait_flag"):
                op.detach()

    with emulate(toolchain=toolchain, checks=True, distinct=True, mutate=mutate), pytest.raises(FindingsError) as caught:
        rms_norm()
    assert {finding.program for finding in caught.value.findings} == {(TAIL, 0, 0)}
    assert "race" in {finding.kind for finding in caught.value.findings}


@pytest.mark.parametrize("toolchain", TOOLCHAINS)
def test_a_branch_on_what_was_computed_is_followed(toolchain):
    x, y = torch.randn(9 * 64), torch.empty(9 * 64)
    x[5 * 64 + 7] = 1000.0
    with emulate(toolchain=toolchain, checks=True, distinct=True) as emulation:
        steered_kernel[(9,)](x, y)
    assert emulation.launches[0].programs == (0, 5, 8)


@pytest.mark.parametrize("toolchain", TOOLCHAINS)
def test_sizes_out_of_an_argument_are_followed(toolchain):
    counts = torch.tensor([64, 64, 64, 17, 64, 17, 64], dtype=torch.int32)
    with emulate(toolchain=toolchain, checks=True, distinct=True) as emulation:
        read_only_kernel[(7,)](counts, torch.randn(7 * 64), torch.empty(7 * 64))
    assert emulation.launches[0].programs == (0, 3, 6)


@pytest.mark.parametrize("toolchain", TOOLCHAINS)
def test_an_access_out_of_bounds_is_an_error_in_programs_that_are_not_run(toolchain):
    x, y = torch.randn(5 * 64), torch.empty(5 * 64)
    with emulate(toolchain=toolchain, checks=True, distinct=True) as emulation:
        far_kernel[(5,)](x, y, FAR=0)
    assert emulation.launches[0].programs == (0, 4)
    outside = pytest.raises(OutOfBoundsError, match=r"program \(2, 0, 0\).*y_ptr")
    with emulate(toolchain=toolchain, checks=True, distinct=True), outside:
        far_kernel[(5,)](x, y, FAR=1000)
    with emulate(toolchain=toolchain, checks=True, distinct=True, keep_going=True) as emulation:
        far_kernel[(5,)](x, y, FAR=1000)
    assert [finding.kind for finding in emulation.launches[0].notes] == ["bounds"]


def test_a_part_of_the_programs_is_of_checks():
    with pytest.raises(OfflineError, match="distinct is True without checks"), emulate(final=True, distinct=True):
        pass


@triton.jit
def places_kernel(p_places, n):
    i = tl.program_id(0)
    tl.store(p_places + i * 64 + tl.arange(0, 64), n - 1 - i * 64 - tl.arange(0, 64))


@pytest.mark.parametrize("toolchain", TOOLCHAINS)
def test_integers_are_written_by_all_programs_because_later_launches_may_take_them_for_places(toolchain):
    places = torch.full((6 * 64,), 10**9, dtype=torch.int32)
    with emulate(toolchain=toolchain, checks=True, distinct=True) as emulation:
        places_kernel[(6,)](places, 6 * 64)
    assert len(emulation.launches[0].programs) == 2
    assert torch.equal(places, torch.arange(6 * 64, dtype=torch.int32).flip(0))
