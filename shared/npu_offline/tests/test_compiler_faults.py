"""Faults of the compilers that COMPILER_FAULTS.md describes: still there, where it says. One that is gone fails here."""

import operator
import re
from pathlib import Path

import npu_offline
import pytest
import torch
import triton.language as tl
from fault_kernels import (
    byte_sum_kernel,
    carried_range_kernel,
    compared_mask_kernel,
    composed_operation_kernel,
    doubled_sum_kernel,
    dropped_rounding_kernel,
    dropped_scalar_rounding_kernel,
    dropped_truncation_kernel,
    every_second_kernel,
    gathered_operand_kernel,
    helpers_of_one_name_kernel,
    larger_number_kernel,
    lost_exchange_kernel,
    lost_in_branch_kernel,
    lost_product_kernel,
    lost_rest_kernel,
    lost_start_kernel,
    lost_wait_kernel,
    one_erf_kernel,
    ordered_masks_kernel,
    pairs_kernel,
    partly_checked_kernel,
    plain_return_kernel,
    ragged_mask_kernel,
    ragged_product_kernel,
    remainder_rows_kernel,
    reused_flag_kernel,
    rounded_division_kernel,
    rounded_numbers_kernel,
    shared_buffer_kernel,
    shifted_mask_kernel,
    summed_mask_kernel,
    summed_products_kernel,
    swapped_value_kernel,
    taken_lock_kernel,
    two_updates_kernel,
    unbounded_descriptor_kernel,
    unlocked_exchange_kernel,
    unordered_sum_kernel,
    unordered_while_kernel,
    unrolled_logsumexp_kernel,
    unrounded_arithmetic_kernel,
    unsigned_kernel,
    unsigned_product_kernel,
)
from npu_offline.cli import main
from npu_offline.errors import reason_of
from npu_offline.toolchain.compilation import compile_linalg, front_end_of

REASON = "needs triton-ascend and the three toolchains (npu-offline fetch)"
pytestmark = [pytest.mark.compilers, pytest.mark.skipif(len(npu_offline.installed()) < 3, reason=REASON)]
GONE = "this compiler no longer has the fault: say so in COMPILER_FAULTS.md"


PACKAGE = Path(__file__).parents[1]
CITED = re.compile(r"compiler faults? (\d+)")


def run(kernel, arguments, toolchain, final=True, grid=1, **constants):
    with npu_offline.emulate("Ascend910B4", toolchain=toolchain, final=final):
        kernel[(grid,)](*arguments, **constants)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_faults_are_numbered_and_every_number_that_code_cites_is_a_fault():
    text = (PACKAGE / "COMPILER_FAULTS.md").read_text()
    headings = [(int(number), title) for number, title in re.findall(r"^## (\d+)\. (.*)$", text, re.M)]
    assert [number for number, _ in headings] == list(range(1, len(headings) + 1))
    assert re.findall(r"^\| (\d+)\. (.*?) \|", text, re.M) == [(str(number), title) for number, title in headings]
    for file in PACKAGE.parents[1].glob("*/*/src/**/*.py"):
        cited = {int(number) for number in CITED.findall(file.read_text())}
        assert cited <= {number for number, _ in headings}, file


@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_a_sum_that_begins_as_a_carried_value_shares_its_buffer(toolchain):
    n_rows, n_blocks, width = 3, 4, 1024
    x = torch.randn(n_rows * n_blocks + 1, width, generator=torch.Generator().manual_seed(0)).bfloat16()
    y = torch.empty(n_rows, width)
    groups = x[:-1].float().view(n_rows, n_blocks, width)
    exact = groups[:, 0] + groups[:, 1:].square().sum(1)
    for final in (False, True):
        run(shared_buffer_kernel, (x, y, n_rows, n_blocks), toolchain, final, BLOCK=width, multibuffer=False)
        assert torch.allclose(y, exact, atol=1e-3) == (not final), GONE


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_a_cast_that_is_cast_back_is_left_out_on_cann_8_5(toolchain, apart):
    x = torch.randn(1024, generator=torch.Generator().manual_seed(0))
    y = torch.empty(1024)
    run(dropped_rounding_kernel, (x, y), toolchain, BLOCK=1024, APART=apart)
    rounded = (x * (1.0 / 3.0)).bfloat16().float() * 3.0
    is_right = torch.allclose(y, rounded, rtol=1e-5, atol=0)
    assert is_right == (apart or toolchain != "1.0.0"), GONE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("sign", "compute"), [("+", operator.add), ("-", operator.sub), ("*", operator.mul)])
@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_arithmetic_in_bf16_is_not_rounded(toolchain, sign, compute, dtype):
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(1024, generator=generator).to(dtype) for _ in range(2))
    y = torch.empty(1024)
    run(unrounded_arithmetic_kernel, (x, w, y), toolchain, final=False, BLOCK=1024, OPERATION=sign)
    assert torch.equal(y, compute(x, w).float())
    run(unrounded_arithmetic_kernel, (x, w, y), toolchain, BLOCK=1024, OPERATION=sign)
    is_unrounded = dtype == torch.bfloat16
    assert torch.equal(y, compute(x.float(), w.float()) if is_unrounded else compute(x, w).float()), GONE


@pytest.mark.parametrize("multibuffer", [True, False])
@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_sums_of_an_inner_loop_have_no_barrier_between_them_where_the_outer_loop_has_two_buffers(toolchain, multibuffer):
    n_blocks, n_rows, width = 3, 5, 1024
    x = torch.randn(n_rows, n_blocks * width, generator=torch.Generator().manual_seed(0))
    y = torch.empty(n_blocks * width)
    with npu_offline.emulate("Ascend910B4", toolchain=toolchain, checks=True, keep_going=True) as emulation:
        unordered_sum_kernel[(1,)](x, y, n_blocks, n_rows, x.shape[1], BLOCK=width, multibuffer=multibuffer)
    assert torch.allclose(y, x.sum(0), atol=1e-5)  # in program order
    found = [finding for finding in emulation.launches[0].notes if finding.kind == "hazard"]
    unordered = [finding for finding in found if "RAW" in finding.text and finding.text.count("vadd") == 2]
    assert bool(unordered) == (multibuffer and toolchain != "1.0.0"), GONE


@pytest.mark.parametrize("branch", [True, False])
@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_what_a_branch_in_a_loop_yields_is_lost_on_cann_8_5(toolchain, branch):
    n_tiles, n_blocks, shape = 3, 4, (2, 64)
    x = torch.randn(n_tiles, n_blocks, *shape, generator=torch.Generator().manual_seed(0))
    y = torch.empty(n_tiles, *shape)
    scores = x.amax(3)  # [n_tiles, n_blocks, 2]
    largest = torch.cat((scores[:1, 0], scores[1:].amax(1)))  # of each tile; in the first one nothing is careful
    expected = (x[:, 1:] * (scores[:, 1:] - largest[:, None]).exp()[..., None]).sum(1)
    for final in (False, True):
        run(lost_in_branch_kernel, (x, y, n_tiles, n_blocks), toolchain, final, BLOCK_M=2, BLOCK_D=64, BRANCH=branch)
        is_right = torch.allclose(y, expected, atol=1e-4)
        assert is_right == (not final or not branch or toolchain != "1.0.0"), GONE


@pytest.mark.parametrize("exchanges", [0, 8])
@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_a_flag_is_set_again_behind_the_loop_that_carries_it_on_cann_8_5(toolchain, exchanges):
    n_tiles, n_blocks, width = 3, 4, 64
    x = torch.randn(n_tiles, n_blocks, width, generator=torch.Generator().manual_seed(0)) / 8
    y = torch.empty(n_tiles)
    extra = x[0, 0, 0]
    for _ in range(exchanges):
        extra = (extra * 0.5).exp()
    with npu_offline.emulate("Ascend910B4", toolchain=toolchain, checks=True, keep_going=True) as emulation:
        reused_flag_kernel[(1,)](x, y, n_tiles, n_blocks, BLOCK=width, EXCHANGES=exchanges)
    assert torch.allclose(y, x.sum(2).logsumexp(1) + extra, atol=1e-5)  # in program order
    twice = [finding for finding in emulation.launches[0].notes if finding.kind == "flag" and "set again" in finding.text]
    assert bool(twice) == (exchanges == 8 and toolchain == "1.0.0"), GONE


@pytest.mark.parametrize("tile", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_a_rounding_of_a_single_number_is_left_out(toolchain, dtype, tile):
    x = normal(16, 64)
    for final in (False, True):
        y = torch.empty(16)
        constants = {"BLOCK": 64, "DTYPE": getattr(tl, dtype), "TILE": tile}
        run(dropped_scalar_rounding_kernel, (x, y), toolchain, final, 16, **constants)
        is_rounded = torch.equal(y, (y / 3).to(getattr(torch, dtype)).float() * 3)
        assert is_rounded == (tile or not final), GONE
        assert torch.allclose(y, 3 * x.sum(1), rtol=2**-8)


@pytest.mark.parametrize("through", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32"])
@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_a_cast_to_int8_that_is_cast_back_is_left_out(toolchain, dtype, through):
    x, y = (normal(64) * 20).abs(), torch.empty(64)
    run(dropped_truncation_kernel, (x, y), toolchain, BLOCK=64, DTYPE=getattr(tl, dtype), THROUGH=through)
    has_fault = not through and dtype in ("int8", "uint8")
    assert torch.equal(y, x if has_fault else x.trunc()), GONE


@pytest.mark.parametrize("in_while", [True, False])
@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_a_tile_that_a_while_carries_is_stored_before_it_is_complete_on_cann_8_5(toolchain, in_while):
    x, y = normal(5, 1024), torch.empty(1024)
    with npu_offline.emulate("Ascend910B4", toolchain=toolchain, checks=True, keep_going=True) as emulation:
        unordered_while_kernel[(1,)](x, y, 5, BLOCK=1024, WHILE=in_while)
    assert torch.allclose(y, x.sum(0), atol=1e-5)  # in program order
    races = [finding.text for finding in emulation.launches[0].notes if finding.kind == "race"]
    assert any("store" in text and "copy" in text for text in races) == (in_while and toolchain == "1.0.0"), GONE


@pytest.mark.parametrize("final", [False, True])
def test_a_load_with_a_mask_that_is_no_rectangle_reads_the_whole_tile(final):
    x, y = normal(1000), torch.empty(1024)
    run(ragged_mask_kernel, (x, y, 1000), "1.2.0", final, ROWS=16, BLOCK=64, AXES=1)
    assert torch.equal(y, torch.nn.functional.pad(x, (0, 24)))
    with pytest.raises(npu_offline.OutOfBoundsError, match="read of 4096 bytes"):  # no error: the front end no longer has it
        run(ragged_mask_kernel, (x, y, 1000), "1.2.0", final, ROWS=16, BLOCK=64, AXES=2)


def test_of_two_helpers_of_one_name_the_second_computes_the_first(monkeypatch):
    from npu_offline.toolchain import helpers

    monkeypatch.setattr(helpers, "computes_the_same", lambda one, other: True)
    size = 128  # another than in test_helpers.py: Triton's cache keeps what is compiled here without the check
    x, y = normal(size), torch.empty(size)
    run(helpers_of_one_name_kernel, (x, y), "1.2.0", final=False, BLOCK=size)
    assert torch.allclose(y, 100 * x), GONE


@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_the_old_value_of_an_exchange_is_read_without_the_lock(toolchain, one):
    block = 1 if one else 64
    x, y = torch.zeros(block), normal(4, block)
    given = y.clone()
    options = {"races": True, "keep_going": True}
    with npu_offline.emulate("Ascend910B4", toolchain=toolchain, final=True, threads=1, **options) as emulation:
        unlocked_exchange_kernel[(4,)](x, y, BLOCK=block, ONE=one)
    if not emulation.launches[0].notes:
        before = torch.cat((torch.zeros(1, block), given[:-1]))
        assert torch.allclose(y, before.cumsum(0) if one else before)  # in program order
    races = [finding.text for finding in emulation.launches[0].notes if finding.kind == "programs"]
    assert any("read of 4 bytes" in text for text in races) == (not one or toolchain == "1.0.0"), GONE


@pytest.mark.parametrize("final", [False, True])
def test_the_high_half_of_an_unsigned_product_is_that_of_a_signed_one(final):
    x, y = torch.tensor([3, -1, -2, 2**30] * 4, dtype=torch.int32), torch.empty(16, dtype=torch.int32)
    run(unsigned_product_kernel, (x, y), "1.2.0", final, BLOCK=16)
    signed, unsigned = (x.long() ** 2) >> 32, ((x.long() % 2**32) ** 2) >> 32
    assert torch.equal(y.long() % 2**32, signed % 2**32) and not torch.equal(signed, unsigned), GONE


@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_a_product_that_is_added_by_atomics_is_lost(toolchain):
    a, b, total = normal(32, 32), normal(32, 32, seed=1), torch.ones(32, 32)
    if toolchain == "1.0.0":
        run(lost_product_kernel, (a, b, total), toolchain, BLOCK=32)
        assert torch.allclose(total, 1 + a @ b, atol=1e-4)
        return
    with pytest.raises(Exception) as caught:
        run(lost_product_kernel, (a, b, total), toolchain, BLOCK=32)
    assert "gave no address to the buffer memref<32x32xf32" in reason_of(caught.value), GONE


@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_both_vector_cores_add_what_one_should(toolchain):
    a, b, total = normal(32, 32), normal(32, 32, seed=1), torch.ones(32, 32)
    run(doubled_sum_kernel, (a, b, total, 3.0), toolchain, BLOCK=32)
    times = 1 if toolchain == "1.0.0" else 2
    assert torch.allclose(total, 1 + times * 3 * (a @ b), atol=1e-3), GONE


def test_check_says_that_a_module_which_cannot_be_right_is_a_finding(capsys):
    kernel = f"{Path(__file__).parent / 'fault_kernels.py'}::lost_product_kernel"
    given = "p_a=fp32:32x32 p_b=fp32:32x32 p_sum=fp32:32x32:zeros BLOCK=32 --grid 1 --soc Ascend910B4 --toolchain 1.2.0"
    assert main(["check", kernel, *given.split()]) == 1
    assert "not executed: kernel lost_product_kernel_mix_aic: 1 findings" in capsys.readouterr().out


@pytest.mark.parametrize("final", [False, True])
def test_a_compare_and_swap_returns_the_new_value(final):
    lock, old = torch.zeros(1, dtype=torch.int32), torch.full((1,), 9, dtype=torch.int32)
    run(swapped_value_kernel, (lock, old), "1.2.0", final)
    assert lock.item() == 1 and old.item() == 1, GONE


@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_rows_of_a_product_behind_a_mask_are_not_written(toolchain, chosen):
    a, b, y = normal(32, 32), normal(32, 32, seed=1), torch.empty(32, 32)
    run(ragged_product_kernel, (a, b, y, 6), toolchain, BLOCK=32, CHOSEN=chosen)
    assert torch.allclose(y[:6], (a @ b)[:6], atol=1e-4)
    assert torch.equal(y[6:], torch.zeros(26, 32)) == chosen, GONE


@pytest.mark.parametrize("plain", [False, True])
def test_a_mask_that_compares_a_difference_reads_the_whole_tile(plain):
    x, y = normal(1000), torch.empty(1000)
    if plain:
        run(shifted_mask_kernel, (x, y, 1000), "1.2.0", final=False, grid=4, BLOCK=256, PLAIN=True)
        assert torch.equal(y, torch.cat((torch.zeros(3), x[:-3])))
        return
    with pytest.raises(npu_offline.OutOfBoundsError, match="one that triton-ascend does not keep: compiler fault 10"):
        run(shifted_mask_kernel, (x, y, 1000), "1.2.0", final=False, grid=4, BLOCK=256, PLAIN=False)


@pytest.mark.parametrize("both", [False, True])
def test_a_block_pointer_with_one_axis_checked_leaves_rows_out(both):
    x, y = normal(8, 20), torch.full((8, 20), torch.nan)
    run(partly_checked_kernel, (x, y, 8, 20), "1.2.0", final=False, grid=2, BLOCK_M=4, BLOCK_N=32, BOTH=both)
    assert torch.equal(y[:4], x[:4])
    assert torch.equal(y[4:], x[4:]) == both, GONE


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_an_exchange_of_one_number_is_not_written(toolchain, loaded):
    for final in (False, True):
        x, new, old = (torch.full((8,), value, dtype=torch.int32) for value in (5, 7, 9))
        run(lost_exchange_kernel, (x, new, old, 7), toolchain, final, BLOCK=8, LOADED=loaded)
        assert old[0] == 5
        assert x[0] == (5 if final and not loaded else 7), GONE


@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_updates_at_two_places_do_not_exclude_each_other(toolchain, one):
    x = torch.zeros(1, dtype=torch.int32)
    if one:
        run(two_updates_kernel, (x,), toolchain, grid=4, ONE=True)
        assert x.item() == 3
    else:
        with pytest.raises(npu_offline.RaceError, match="no lock keeps the two apart: compiler fault 31"):
            run(two_updates_kernel, (x,), toolchain, grid=4, ONE=False)


@pytest.mark.parametrize("threads", [1, 8])
def test_the_release_of_a_lock_may_be_lost(threads):
    lock, y = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    said = pytest.raises(npu_offline.RaceError, match=r"argument p_lock .* no lock keeps the two apart")
    with said, npu_offline.emulate("Ascend910B4", toolchain="1.2.0", final=True, threads=threads):
        taken_lock_kernel[(40,)](lock, y)


def test_a_loop_that_only_waits_is_left_out(monkeypatch):
    from npu_offline.execute import settings

    monkeypatch.setattr(settings, "PROGRAM_SECONDS", 1)  # no error: the front end no longer has it
    turn, y = torch.zeros(2, 1, dtype=torch.int32)
    run(lost_wait_kernel, (turn, y), "1.2.0", final=False)
    assert y.item() == 1, GONE


@pytest.mark.parametrize("cut", [False, True])
def test_a_mask_beside_rows_that_are_a_remainder_reads_the_whole_tile(cut):
    x, y = normal(5, 24), torch.empty(16, 32)
    constants = {"BLOCK_M": 16, "BLOCK_N": 32, "CUT": cut}
    if cut:
        run(remainder_rows_kernel, (x, y, 5, 24), "1.2.0", final=False, **constants)
        assert torch.equal(y, torch.nn.functional.pad(x, (0, 8, 0, 11)))
        return
    with pytest.raises(npu_offline.OutOfBoundsError, match="one that triton-ascend does not keep: compiler fault 10"):
        run(remainder_rows_kernel, (x, y, 5, 24), "1.2.0", final=False, **constants)


@pytest.mark.parametrize(("operation", "number"), [("== True", 1), ("!=", 1), ("!=", -1), ("^", 1)])
@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_a_mask_that_is_compared_with_a_true_number(toolchain, operation, number):
    x, y = normal(64), torch.empty(64, dtype=torch.int32)
    exact = (x > 0).int() if operation == "== True" else ((x > 0) ^ (number > 0)).int()
    for final in (False, True):
        run(compared_mask_kernel, (x, torch.tensor([float(number)]), y), toolchain, final, BLOCK=64, OPERATION=operation)
        wrong = final and operation != "^" and number > 0
        assert torch.equal(y, torch.full_like(y, operation == "!=") if wrong else exact), GONE


UNSIGNED = {
    ">>": lambda x: x >> 1,
    "wider": lambda x: x,
    "maximum": lambda x: x.clamp(min=1),
    "minimum": lambda x: x.clamp(max=1),
}


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("operation", UNSIGNED)
@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_unsigned_vectors_are_taken_as_signed(toolchain, operation, bits):
    given = normal(64).mul(2.0**bits).to(torch.int64) % 2**bits
    signed = (given + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)
    x = signed.to(getattr(torch, f"int{bits}"))
    y = torch.empty(64, dtype=torch.int64 if operation == "wider" else x.dtype)
    for final in (False, True):
        run(unsigned_kernel, (x, y), toolchain, final, BLOCK=64, DTYPE=getattr(tl, f"uint{bits}"), OPERATION=operation)
        exact, wrong = (UNSIGNED[operation](each).to(y.dtype) for each in (given, signed))
        assert not torch.equal(exact, wrong)
        assert torch.equal(y, wrong if final and bits > 8 else exact), GONE


@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_uint32_becomes_fp16_as_a_signed_number(toolchain):
    x, y = torch.tensor([-1, -5, 7, 2**30] * 16, dtype=torch.int32), torch.empty(64, dtype=torch.float16)
    for final in (False, True):
        run(unsigned_kernel, (x, y), toolchain, final, BLOCK=64, DTYPE=tl.uint32, OPERATION="float16")
        assert y[:4].tolist() == ([-1, -5, 7, torch.inf] if final else [torch.inf, torch.inf, 7, torch.inf]), GONE


@pytest.mark.parametrize(("operation", "dtype"), [("masked >>", torch.int32), ("masked wider", torch.int64)])
@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_a_mask_makes_them_unsigned(toolchain, operation, dtype):
    x = normal(64).mul(2.0**30).to(torch.int32)
    y = torch.empty(64, dtype=dtype)
    run(unsigned_kernel, (x, y), toolchain, BLOCK=64, DTYPE=tl.uint32, OPERATION=operation)
    assert torch.equal(y, UNSIGNED[operation.split()[1]](x.long() % 2**32).to(dtype))


@pytest.mark.parametrize(("dtype", "wide"), [("int8", False), ("uint8", False), ("uint8", True)])
@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_a_sum_of_bytes_that_is_widened_is_not_cut(toolchain, dtype, wide):
    x, y = torch.tensor([100, -100, 7, -1] * 16, dtype=torch.int8), torch.empty(64, dtype=torch.int64)
    cut = [-56, 56, 14, -2] if dtype == "int8" else [200, 56, 14, 254]
    for final in (False, True):
        run(byte_sum_kernel, (x, y), toolchain, final, BLOCK=64, DTYPE=getattr(tl, dtype), WIDE=wide)
        assert y[:4].tolist() == ([200, -200, 14, -2] if final and not wide else cut), GONE


@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_the_error_function_of_one_number_drops_nan(toolchain):
    x, y = torch.tensor([torch.nan]), torch.empty(1)
    for final in (False, True):
        run(one_erf_kernel, (x, y), toolchain, final)
        assert y.isnan().item() == (not final or toolchain == "1.2.0"), GONE


@pytest.mark.parametrize("operation", ["//", "wide //"])
@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_quotients_of_int32_are_made_in_fp32(toolchain, operation):
    x = torch.tensor([50331647, 2**24 - 1, 2**31 - 1, 7] * 16, dtype=torch.int32)
    y = torch.empty(64, dtype=torch.int32)
    for final in (False, True):
        run(rounded_division_kernel, (x, y, 3), toolchain, final, BLOCK=64, OPERATION=operation)
        right = [True, True, True, True] if operation != "//" or not final else [False, True, False, True]
        assert (y == x // 3)[:4].tolist() == right, GONE


@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_remainders_of_floats_come_of_a_rounded_quotient(toolchain):
    x, y = torch.tensor([1e8, 1e6, 7.5, -7.5] * 16), torch.empty(64)
    run(rounded_division_kernel, (x, y, 3.0), toolchain, BLOCK=64, OPERATION="%")
    assert x[:4].fmod(3.0).tolist() == [1.0, 1.0, 1.5, -1.5]
    assert y[:4].tolist() == [0.0, 1.0, 1.5, -1.5], GONE


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_the_sum_of_a_mask_is_no_count(toolchain, counted):
    for ones in (35, 36):
        x, y = torch.where(torch.arange(64) < ones, 1.0, -1.0), torch.empty(1, dtype=torch.int32)
        for final in (False, True):
            constants = {"BLOCK": 64, "DTYPE": tl.int32 if counted else tl.int1, "RUNNING": False}
            run(summed_mask_kernel, (x, y), toolchain, final, **constants)
            assert y.item() == (ones if counted else 1 if final else ones % 2), GONE


@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_the_running_sum_of_a_mask_does_not_compile(toolchain):
    x, y = normal(64), torch.empty(64, dtype=torch.int32)
    with pytest.raises(Exception) as caught:
        run(summed_mask_kernel, (x, y), toolchain, BLOCK=64, DTYPE=tl.int1, RUNNING=True)
    assert "'hfusion.cumsum' op operand #0 must be" in reason_of(caught.value), GONE


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_the_maximum_of_a_tile_keeps_nan_and_that_of_two_numbers_drops_it(toolchain, everywhere):
    x, y, largest = normal(64), torch.empty(64), torch.empty(1)
    x[3] = torch.nan
    for final in (False, True):
        run(larger_number_kernel, (x, y, largest), toolchain, final, BLOCK=64, ALL=everywhere)
        assert largest.isnan().item() == final, GONE
        assert y[3].isnan().item() == everywhere
        assert y.nan_to_num(0).equal(x.nan_to_num(0).clamp(min=0))


@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_a_fused_sum_of_a_product_rounds_the_product(toolchain):
    x, y = torch.full((64,), 1 + 2.0**-12), torch.empty(64)
    for final in (False, True):
        run(composed_operation_kernel, (x, y), toolchain, final, BLOCK=64, OPERATION="fma")
        assert y[0].item() == (0 if final else 2.0**-24), GONE


@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_powers_of_two_are_powers_of_e_of_a_rounded_product(toolchain):
    x, y = torch.arange(64) + 32.0, torch.empty(64)
    run(composed_operation_kernel, (x, y), toolchain, BLOCK=64, OPERATION="exp2")
    error = (y.double() / x.double().exp2() - 1).abs().max().item()
    assert 8 * 2.0**-23 < error < 32 * 2.0**-23, GONE


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("final", [False, True])
def test_a_range_of_a_gather_begins_at_zero(final, apart):
    x, y = normal(64), torch.empty(16)
    index = torch.arange(16, dtype=torch.int32).flip(0)
    run(lost_start_kernel, (index, x, y), "1.2.0", final, START=24, BLOCK=16, APART=apart)
    assert torch.equal(y, x[15 + (24 if apart else 0)].expand(16)), GONE


@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_one_input_has_two_modules_on_cann_8_5(toolchain):
    with npu_offline.record("Ascend910B4") as launches:
        summed_products_kernel[(1,)](normal(4, 256), normal(4, 256), torch.empty(256), 4, BLOCK=256)
    name, ttir, linalg = front_end_of(launches[0])
    modules = set()
    for compilation in range(24):  # the odds that 24 of two equally likely modules are one: 2^-23
        modules.add(compile_linalg(name, ttir, linalg, {}, "Ascend910B4", toolchain, compilation).stages["final"])
        if len(modules) > 1:
            break
    assert len(modules) == (2 if toolchain == "1.0.0" else 1), GONE
    apart = {re.sub(r"%\w+|\d+", "", module) for module in modules}
    assert len({"\n".join(sorted(text.splitlines())) for text in apart}) == 1  # the same operations


def test_an_unrolled_loop_keeps_the_tiles_of_every_turn_on_a_950():
    used = {}
    for soc in ("Ascend910B4", "Ascend950PR_957b"):
        for unrolled in (False, True):
            constants = {"BLOCK": 8192, "TURNS": 4, "UNROLLED": unrolled}
            signature = {"p_x": "*bf16", "p_y": "*fp32"}
            report = npu_offline.compile_kernel(unrolled_logsumexp_kernel, signature, constants, soc=soc, toolchain="1.2.0")
            used[soc, unrolled] = report.ub.used
    assert used["Ascend950PR_957b", True] > 2.5 * used["Ascend950PR_957b", False], GONE
    assert used["Ascend910B4", True] < 1.5 * used["Ascend910B4", False]


@pytest.mark.parametrize("masked", [False, True])
def test_a_stride_of_two_reads_one_element_more(masked):
    x, y = normal(127), torch.empty(64)
    if masked:
        run(every_second_kernel, (x, y, 64), "1.2.0", final=False, BLOCK=64, MASKED=True)
        assert torch.equal(y, x[::2])
        return
    with pytest.raises(npu_offline.OutOfBoundsError, match="read of 512 bytes"):  # no error: the front end no longer has it
        run(every_second_kernel, (x, y, 64), "1.2.0", final=False, BLOCK=64, MASKED=False)


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_the_mask_of_a_range_that_a_loop_carries_is_lost(toolchain, counted):
    x = normal(128)
    for final in (False, True):
        y = torch.zeros(128)
        run(carried_range_kernel, (x, y), toolchain, final, N=100, BLOCK=64, COUNTED=counted)
        stop = 128 if final and not counted else 100
        assert torch.equal(y, torch.where(torch.arange(128) < stop, x, 0.0)), GONE


@pytest.mark.parametrize(("toolchain", "remainder"), [("1.0.0", True), ("1.1.0", True), ("1.1.0", False), ("1.2.0", True)])
def test_an_operand_of_a_product_whose_columns_are_a_remainder_is_not_loaded(toolchain, remainder):
    a, b = normal(32, 64).half(), normal(64, 32).half()
    for final in (False, True):
        y = torch.zeros(32, 32)
        run(gathered_operand_kernel, (a, b, y, 64, 32), toolchain, final, B=32, REMAINDER=remainder)
        lost = final and toolchain == "1.1.0" and remainder
        assert torch.allclose(y, a.float() @ b.float(), atol=1e-3) != lost, GONE


@pytest.mark.parametrize(
    ("nested", "flag", "factor"), [(True, 0, 2), (True, 1, 2), (False, 1, 0), (False, 2, 0), (False, 0, 2)]
)
def test_what_two_branches_reach_behind_a_return_runs_in_one_of_them(nested, flag, factor):
    x, flags = normal(100), torch.tensor([flag], dtype=torch.int32)
    for kernel, constants in ((lost_rest_kernel, {"NESTED": nested}), (plain_return_kernel, {})):
        y = torch.ones(100)
        run(kernel, (flags, x, y, 100), "1.2.0", final=False, grid=2, BLOCK=64, **constants)
        if kernel is plain_return_kernel:
            assert torch.equal(y, 2 * x if flag < 2 else torch.ones(100))
        else:
            lost = (nested, flag) in ((True, 0), (False, 1))
            assert torch.equal(y, torch.ones(100) if lost else factor * x), GONE


@pytest.mark.parametrize("operation", ["<", "<=", ">", ">=", "&"])
@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_masks_are_not_ordered(toolchain, operation):
    x, z, y = normal(64), normal(64, seed=1), torch.empty(64, dtype=torch.int32)
    compare = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}.get(operation, operator.lt)
    expected = compare((x > 0).int(), (z > 0).int()).int()
    run(ordered_masks_kernel, (x, z, y), toolchain, final=False, BLOCK=64, OPERATION=operation)
    assert torch.equal(y, expected)
    if operation == "&":
        run(ordered_masks_kernel, (x, z, y), toolchain, BLOCK=64, OPERATION=operation)
        assert torch.equal(y, expected)
    elif toolchain == "1.0.0" or (toolchain, operation) == ("1.1.0", ">="):
        run(ordered_masks_kernel, (x, z, y), toolchain, BLOCK=64, OPERATION=operation)
        assert not torch.equal(y, expected), GONE
    else:
        with pytest.raises(Exception, match="vcmp__1d_half|unsupported hfusion::CompareFn"):  # no error: it is gone
            run(ordered_masks_kernel, (x, z, y), toolchain, BLOCK=64, OPERATION=operation)


def test_a_tensor_descriptor_does_not_check_its_shape():
    x, y = normal(20, 32), torch.full((20, 32), -1.0)
    run(unbounded_descriptor_kernel, (x, y, 10, 32), "1.2.0", final=False, BLOCK_M=16, BLOCK_N=32)
    assert torch.equal(y[:16], x[:16].abs()), GONE  # 10 rows are to be written


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_a_masked_tile_whose_pairs_are_split_is_not_loaded(toolchain, masked):
    x, largest, y = normal(128), torch.full((2,), -1.0), torch.full((64,), -1.0)
    arguments, tile = (x, largest, y, 128), {"ROWS": 2, "COLUMNS": 64, "MASKED": masked}
    if masked and toolchain == "1.0.0":
        with pytest.raises(Exception, match="memref.collapse_shape"):  # no error: it is gone
            run(pairs_kernel, arguments, toolchain, **tile)
        return
    run(pairs_kernel, arguments, toolchain, **tile)
    assert torch.equal(largest, x.view(2, 64).amax(1)) != masked, GONE
    assert torch.allclose(y, x.view(64, 2).sum(1)) != masked, GONE


@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_a_number_that_becomes_bf16_is_rounded_away_from_zero(toolchain):
    x = torch.tensor([37.125, -37.125, 37.375, 1.0])  # three lie halfway between two numbers of bf16
    y = torch.zeros(4, dtype=torch.bfloat16)
    run(rounded_numbers_kernel, (x, y, 4), toolchain)
    assert y.tolist() == ([37.25, -37.25, 37.5, 1.0] if toolchain == "1.0.0" else x.bfloat16().tolist()), GONE
