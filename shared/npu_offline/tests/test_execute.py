"""Execution of final modules: values, and what the checks find in modules that something was taken out of."""

import re

import fault_kernels
import pytest
import sample_kernels
import timing_kernels
import torch
import triton.language as tl
from npu_offline import FindingsError, OutOfBoundsError, emulate
from npu_offline.check.execution import execute_calls
from npu_offline.module.mlir import name_of, property_of, symbol_of
from xdsl.dialects.builtin import SymbolRefAttr

TOOLCHAINS = ("1.0.0", "1.1.0", "1.2.0")


def rms_norm(rows=33, width=96):
    x, w, y = torch.randn(rows, width), torch.randn(width), torch.full((rows, width), float("nan"))
    sample_kernels.rms_norm[(4,)](x, w, y, rows, 1e-5, D=width, BM=4)
    expected = x.double() * (x.double().square().mean(1, keepdim=True) + 1e-5).rsqrt() * w.double()
    return y, expected


@pytest.mark.parametrize("toolchain", TOOLCHAINS)
def test_a_final_module_computes_what_its_kernel_says(toolchain):
    with emulate(toolchain=toolchain, final=True):
        y, expected = rms_norm()
    assert torch.allclose(y.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.float32])
@pytest.mark.parametrize("toolchain", TOOLCHAINS)
def test_bytes_without_a_sign_are_cast_as_such(toolchain, dtype):
    x, y = torch.arange(256, dtype=torch.uint8), torch.zeros(256, dtype=dtype)
    with emulate(toolchain=toolchain, final=True):
        sample_kernels.cast[(2,)](x, y, BN=128)
    assert torch.equal(y.int(), x.int())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_each_operation_is_rounded(dtype):
    x, y = torch.randn(256).to(dtype), torch.empty(256, dtype=dtype)
    with emulate():
        sample_kernels.polynomial[(1,)](x, y, BN=256)
    assert torch.equal(y, (x * x + x) * x - x)
    assert not torch.equal(y.float(), (x.double() * x + x) * x - x)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("toolchain", [None, *TOOLCHAINS])
def test_every_second_element_of_rows_with_a_hint_to_the_compiler(toolchain, first):
    x, y = torch.randn(8, 128).bfloat16(), torch.full((8, 64), float("nan")).bfloat16()
    with emulate(toolchain=toolchain or TOOLCHAINS[-1], final=toolchain is not None):
        sample_kernels.every_second[(1,)](x, y, BM=8, D=64, FIRST=first)
    assert torch.equal(y, x[:, first::2])


@pytest.mark.parametrize("toolchain", TOOLCHAINS)
def test_vector_cores_may_run_ahead_of_the_cube_core_as_far_as_a_counter_counts(toolchain):
    a, b, c = torch.randn(16, 16, 16), torch.randn(16, 16, 16), torch.full((16, 16), float("nan"))
    with emulate(toolchain=toolchain, final=True):
        sample_kernels.products_of_sums[(1,)](a[:8], b[:8], c, N=8, D=16)
        assert torch.allclose(c.double(), ((a[:8].double() + 1) @ b[:8].double()).sum(0), atol=1e-4)
        with pytest.raises(FindingsError, match="a flag was set 16 times before anything waited for it"):
            sample_kernels.products_of_sums[(1,)](a, b, c, N=16, D=16)


@pytest.mark.parametrize("toolchain", TOOLCHAINS)
def test_products_of_int8_are_exact_in_int32(toolchain):
    a, b = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((32, 64), (64, 48)))
    c = torch.full((32, 48), 77, dtype=torch.int32)
    with emulate(toolchain=toolchain, final=True):
        sample_kernels.product_in[(1,)](a, b, c, M=32, K=64, N=48, DTYPE=tl.int32)
    assert torch.equal(c.long(), a.long() @ b.long())


@pytest.mark.parametrize("toolchain", TOOLCHAINS)
def test_a_sound_module_passes_all_checks_and_its_traffic_is_counted(toolchain):
    with emulate(toolchain=toolchain, checks=True) as emulation:
        y, expected = rms_norm()
    assert torch.allclose(y.double(), expected, rtol=1e-5, atol=1e-6)
    traffic = emulation.launches[0].arguments
    assert traffic["y_ptr"].written == 33 * 96 * 4
    assert traffic["x_ptr"].read == 33 * 96 * 4


@pytest.mark.parametrize("toolchain", TOOLCHAINS)
@pytest.mark.parametrize("kernel", ["matmul", "exp_of_matmul", "matmul_of_exp"])
def test_products_run_on_cube_cores_and_beside_their_vector_cores(kernel, toolchain):
    a, b = torch.randn(192, 128).bfloat16(), torch.randn(128, 64).bfloat16()
    with emulate(toolchain=toolchain, checks=True):
        if kernel == "matmul":
            c = torch.full((192, 64), float("nan"))
            timing_kernels.matmul[(2,)](a, b, c, 192, 64, 128, BM=64, BN=64, BK=64)
            expected = a.double() @ b.double()
        elif kernel == "exp_of_matmul":
            a = a / 16
            c = torch.full((192, 64), float("nan"))
            timing_kernels.exp_of_matmul[(3,)](a, b, c, 128, B=64)
            expected = (a.double() @ b.double()).exp()
        else:
            b = b / 64
            c = torch.full((192, 64), float("nan"), dtype=torch.bfloat16)
            timing_kernels.matmul_of_exp[(2,)](a, b, c, 3, 128, B=64)
            expected = (a.float().exp().bfloat16().double() @ b.double()).exp()
    assert torch.allclose(c.double(), expected, rtol=1e-5 if c.dtype == torch.float32 else 1e-2, atol=1e-4)


@pytest.mark.parametrize("toolchain", TOOLCHAINS)
def test_sums_of_fp16_that_a_compiler_takes_in_fp32_are_no_finding(toolchain):
    x, y = torch.randn(60, 256).half(), torch.full((60,), float("nan"), dtype=torch.float16)
    with emulate(toolchain=toolchain, checks=True):
        sample_kernels.row_sums[(4,)](x, y, 60, BM=16, D=256)
    assert torch.allclose(y.double(), x.double().sum(1), rtol=2**-11, atol=2**-13)


@pytest.mark.parametrize("toolchain", ["1.1.0", "1.2.0"])
def test_wrong_products_are_found_whatever_lies_in_rows_that_nobody_writes(toolchain):
    def mutate(module):
        for op in module.walk():
            if name_of(op) == "hivm.hir.vmul":
                op.name = "hivm.hir.vadd"
            elif symbol_of(op, "callee").startswith("vmul"):
                op.properties["callee"] = SymbolRefAttr(symbol_of(op, "callee").replace("vmul", "vadd"))

    x, weight, y = torch.randn(33, 96), torch.randn(96), torch.full((34, 96), 1e30)
    with emulate(toolchain=toolchain, checks=True):
        sample_kernels.rms_norm[(3,)](x, weight, y, 33, 1e-6, D=96, BM=4)
    assert torch.equal(y[33], torch.full((96,), 1e30))
    with (
        emulate(toolchain=toolchain, checks=True, mutate=mutate),
        pytest.raises(FindingsError, match="y_ptr is not what its Linalg IR"),
    ):
        sample_kernels.rms_norm[(3,)](x, weight, y, 33, 1e-6, D=96, BM=4)


def test_a_sum_of_fp16_that_is_none_is_found():
    def mutate(module):
        for op in module.walk():
            if "reduce_sum" in symbol_of(op, "callee"):
                op.properties["callee"] = SymbolRefAttr(symbol_of(op, "callee").replace("sum", "max"))

    x = torch.randn(60, 256).half()
    with emulate(checks=True, mutate=mutate), pytest.raises(FindingsError, match="results.*y_ptr is not what its Linalg IR"):
        sample_kernels.row_sums[(4,)](x, torch.empty(60).half(), 60, BM=16, D=256)


@pytest.mark.parametrize("toolchain", TOOLCHAINS)
@pytest.mark.parametrize("soc", ["Ascend910_9362", "Ascend910_9392"])
def test_modules_for_a3_chips_execute(soc, toolchain):
    with emulate(soc, toolchain=toolchain, checks=True) as emulation:
        y, expected = rms_norm()
    assert emulation.soc == soc
    assert torch.allclose(y.double(), expected, rtol=1e-5, atol=1e-6)


def problem_of(call, soc, toolchain):
    (executed,) = execute_calls([("call", call)], soc, toolchain)
    assert executed.launches == []
    return executed.problem


def product_in_fp16():
    a, b, c = (torch.zeros(32, 32, dtype=torch.float16) for _ in range(3))
    sample_kernels.product_in[(1,)](a, b, c, M=32, K=32, N=32, DTYPE=tl.float16)


@pytest.mark.parametrize("toolchain", TOOLCHAINS[:2])  # 1.2.0 sums in fp32
def test_a_product_that_is_summed_in_fp16_is_refused(toolchain):
    assert re.match("execution does not know .*mma", problem_of(product_in_fp16, "Ascend910B4", toolchain))


@pytest.mark.parametrize("toolchain", ["1.1.0", "1.2.0"])
def test_vector_functions_of_the_ascend950_are_refused_by_name(toolchain):
    problem = problem_of(cast, "Ascend950PR_957b", toolchain)
    missing = "pge, vcvtff, vldsx1, vstsx1" if toolchain == "1.2.0" else "vector.transfer_read, vector.transfer_write"
    where = r"\(Ascend950PR_957b, toolchain [\d.]+\)"
    assert re.fullmatch(rf"execution does not know the vector function \w+, nor its {missing} {where}", problem)


@pytest.mark.parametrize("toolchain", TOOLCHAINS)
def test_a_buffer_with_two_addresses_is_refused_by_name(toolchain):
    def call():
        fault_kernels.shared_buffer_kernel[(1,)](torch.randn(13, 1024).bfloat16(), torch.empty(3, 1024), 3, 4, BLOCK=1024)

    problem = problem_of(call, "Ascend910B4", toolchain)
    assert re.match(
        r"the module does not say at which of the addresses \[\d+, \d+\] the buffer memref<1024xf32,.*ub", problem
    )


def test_an_access_outside_an_argument_is_an_error():
    with emulate(final=True), pytest.raises(OutOfBoundsError, match="argument y_ptr"):
        sample_kernels.cast[(3,)](torch.randn(384), torch.empty(256), BN=128)


def without(chosen):
    """Takes out of a module the operations that `chosen` is true of."""

    def mutate(module):
        for op in list(module.walk()):
            if chosen(op):
                op.detach()

    return mutate


def between(op, source, target, *names):
    pipes = [str(property_of(op, which)) for which in ("set_pipe", "wait_pipe")]
    return name_of(op).removeprefix("hivm.hir.") in names and source in pipes[0] and target in pipes[1]


def cast():
    sample_kernels.cast[(1,)](torch.randn(128).bfloat16(), torch.empty(128), BN=128)


@pytest.mark.parametrize("toolchain", TOOLCHAINS)
def test_a_load_that_nothing_orders_before_its_use_is_a_race(toolchain):
    mutate = without(lambda op: between(op, "PIPE_MTE2", "PIPE_V", "set_flag", "wait_flag"))
    found = pytest.raises(FindingsError, match=r"race.*RAW.*V reads.*on MTE2 wrote")
    with emulate(toolchain=toolchain, checks=True, mutate=mutate), found:
        rms_norm()


def test_a_flag_that_nothing_waits_for_is_left_over():
    mutate = without(lambda op: between(op, "PIPE_V", "PIPE_MTE3", "wait_flag"))
    with emulate(checks=True, mutate=mutate), pytest.raises(FindingsError, match="flag 0 of V to MTE3 is left over"):
        cast()


def test_a_flag_that_nothing_sets_is_a_deadlock():
    mutate = without(lambda op: between(op, "PIPE_V", "PIPE_MTE3", "set_flag"))
    with emulate(checks=True, mutate=mutate), pytest.raises(FindingsError, match="deadlock.*MTE3 waits for flag 0 of V"):
        cast()


def test_dependent_instructions_of_one_pipe_without_a_barrier_are_a_hazard():
    mutate = without(lambda op: name_of(op) == "hivm.hir.pipe_barrier" and "PIPE_V" in str(property_of(op, "pipe")))
    with emulate(checks=True, mutate=mutate), pytest.raises(FindingsError, match="hazard.*RAW"):
        rms_norm()


@pytest.mark.parametrize("toolchain", TOOLCHAINS)
def test_an_instruction_in_place_behind_a_reader_of_its_operand_is_a_weak_hazard_without_a_barrier(toolchain):
    def notes(mutate):
        x, y, z = torch.randn(1024), torch.empty(1024), torch.empty(1024)
        with emulate(toolchain=toolchain, checks=True, mutate=mutate) as emulation:
            sample_kernels.exp_and_next[(1,)](x, y, z, BN=1024)
        return [str(note) for note in emulation.launches[0].notes]

    assert not notes(None)
    mutate = without(lambda op: name_of(op) == "hivm.hir.pipe_barrier" and "PIPE_V" in str(property_of(op, "pipe")))
    assert any(re.search(r"weak hazard.*WAR: vadd.* writes .* which vexp.* reads", note) for note in notes(mutate))


def test_results_that_depend_on_bytes_nobody_wrote_are_found():
    mutate = without(lambda op: "load_gm_to_ubuf" in symbol_of(op, "callee"))
    found = pytest.raises(FindingsError, match="y_ptr depends on bytes that nobody has written")
    with emulate(checks=True, mutate=mutate), found:
        cast()


def test_a_buffer_that_another_one_was_written_over_is_found():
    def mutate(module):
        casts = [op for op in module.walk() if name_of(op) == "hivm.hir.pointer_cast" and "128x" in str(op.results[0].type)]
        for op in casts:
            op.operands[0] = casts[0].operands[0]

    with emulate(checks=True, mutate=mutate), pytest.raises(FindingsError, match="alias|plan"):
        cast()
