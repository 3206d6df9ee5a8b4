"""Reports say what the real compilers say of a kernel, for each chip and version."""

import dataclasses
import multiprocessing
import tempfile

import npu_tiling
import pytest
import triton
import triton.language as tl
from npu_offline import CompilationError, UnsupportedError, compile_kernel, record, supported
from npu_offline.module.mlir import parse
from npu_offline.module.plan import read_spec
from npu_offline.reports import Report
from npu_offline.toolchain import compilation
from npu_offline.toolchain.cache import cache_dir
from npu_offline.toolchain.compilers import VERSIONS, is_a5, tool
from npu_offline.toolchain.messages import reason
from npu_offline.toolchain.opt import opt
from sample_kernels import rms_norm


@triton.jit
def copy(x_ptr, y_ptr, BN: tl.constexpr):
    o = tl.program_id(0) * BN + tl.arange(0, BN)
    tl.store(y_ptr + o, tl.load(x_ptr + o))


@triton.jit
def matmul_tile(a_ptr, b_ptr, c_ptr, K, B: tl.constexpr):
    o = tl.arange(0, B)
    acc = tl.zeros([B, B], tl.float32)
    for i_k in range(0, K, B):
        a = tl.load(a_ptr + o[:, None] * K + i_k + o[None, :])
        acc = tl.dot(a, tl.load(b_ptr + (i_k + o)[:, None] * B + o[None, :]), acc)
    tl.store(c_ptr + o[:, None] * B + o[None, :], acc)


@triton.jit
def best(x_ptr, y_ptr, BN: tl.constexpr):
    b_x = tl.load(x_ptr + tl.arange(0, BN))
    tl.store(y_ptr, tl.argmax(b_x, 0))


SIGNATURE = {"x_ptr": "*bf16", "w_ptr": "*bf16", "y_ptr": "*bf16", "n_rows": "i32", "eps": "fp32"}


def _rms_norm(D, BM, **where):
    return compile_kernel(rms_norm, SIGNATURE, {"D": D, "BM": BM}, **where)


@pytest.mark.parametrize("toolchain", VERSIONS)
def test_a_tile_that_fits(toolchain):
    report = _rms_norm(2048, 4, toolchain=toolchain)
    assert report.fits
    assert report.double_buffered is True
    # 18 bytes an element and 6 a column, as the plan of this kernel has been measured.
    assert report.ub.used == pytest.approx(18 * 2048 * 4 + 6 * 2048, rel=0.01)
    assert report.ub.available == 192 * 1024
    assert report.required_ub_bytes is None


@pytest.mark.parametrize("toolchain", VERSIONS)
def test_a_tile_that_cannot_fit(toolchain):
    report = _rms_norm(8192, 4, toolchain=toolchain)
    assert not report.fits
    assert report.double_buffered is None
    assert report.required_ub_bytes > report.ub.available
    assert f"requires {8 * report.required_ub_bytes} bits while {8 * report.ub.available} bits available" in report.message


def test_a_silent_retry_without_double_buffers_is_seen():
    old, new = (_rms_norm(4096, 4, toolchain=version) for version in ("1.1.0", "1.2.0"))
    assert not old.fits
    assert new.fits
    assert new.double_buffered is False
    assert "enable-auto-multi-buffer to false" in new.message


def test_double_buffering_that_is_not_asked_for():
    report = _rms_norm(2048, 2, options={"multibuffer": False})
    assert report.double_buffered is False
    assert report.ub.used < _rms_norm(2048, 2).ub.used


def test_no_loop_has_nothing_to_double_buffer():
    report = compile_kernel(copy, {"x_ptr": "*fp32", "y_ptr": "*fp32"}, {"BN": 1024})
    assert report.double_buffered is None
    assert report.ub.used == 4096


@pytest.mark.parametrize("toolchain", VERSIONS)
def test_matmul_uses_the_cube_cores_buffers(toolchain):
    report = compile_kernel(
        matmul_tile, {"a_ptr": "*bf16", "b_ptr": "*bf16", "c_ptr": "*fp32", "K": "i32"}, {"B": 64}, toolchain=toolchain
    )
    assert report.l1.used == 2 * 2 * 64 * 64 * 2
    assert report.l0c.used == 64 * 64 * 4
    assert report.double_buffered is True


@pytest.mark.parametrize("toolchain", ["1.1.0", "1.2.0"])
def test_ascend950_has_a_compiler_and_more_room(toolchain):
    soc = "Ascend950PR_9589"
    report = _rms_norm(4096, 4, soc=soc, toolchain=toolchain)
    assert report.fits
    assert report.double_buffered is True
    assert report.ub.available == 248 * 1024
    tight = _rms_norm(8192, 4, soc=soc, toolchain=toolchain)
    assert not tight.fits
    assert tight.required_ub_bytes > tight.ub.available


def test_a_temporary_folder_elsewhere_is_no_hindrance(monkeypatch):
    """bishengir-compile-a5 1.1.0 refuses to work in one that is not in /tmp."""
    monkeypatch.setattr(compilation, "_cached", lambda folder, key, build: build())
    with tempfile.TemporaryDirectory(dir=cache_dir()) as folder:
        monkeypatch.setenv("TMPDIR", folder)
        assert _rms_norm(512, 4, soc="Ascend950PR_9589", toolchain="1.1.0").fits


def test_a_target_that_a_version_does_not_know_is_unsupported_not_fitting():
    for soc in ("Ascend950PR_9589", "Ascend910_9589"):  # 1.0.0 lists the second name but has no description of it
        assert not supported(soc, "1.0.0")
        with pytest.raises(UnsupportedError, match=r"1\.0\.0 cannot compile for Ascend9"):
            _rms_norm(1024, 2, soc=soc, toolchain="1.0.0")


def test_every_chip_of_the_table_is_described_as_the_compiler_does():
    sizes = {"UB_SIZE": "ub", "L1_SIZE": "l1", "L0A_SIZE": "l0a", "L0B_SIZE": "l0b", "L0C_SIZE": "l0c"}
    chips = {dataclasses.replace(chip, name=""): chip.name for chip in npu_tiling.SOCS.values()}
    names = [name for name in chips.values() if supported(name, "1.2.0")]
    assert len(names) > 5
    for name in names:
        report = compile_kernel(copy, {"x_ptr": "*fp32", "y_ptr": "*fp32"}, {"BN": 64}, soc=name)
        printer = tool("1.2.0", "bishengir-opt-a5" if is_a5(name) else "bishengir-opt")
        spec = read_spec(parse(opt(printer, report.stages["final"], "--mlir-print-op-generic")))
        chip = npu_tiling.soc(name)
        assert {ours: spec[theirs] // 8 for theirs, ours in sizes.items()} == {
            ours: getattr(chip, f"{ours}_bytes") for ours in sizes.values()
        }
        assert (spec["CUBE_CORE_COUNT"], spec["VECTOR_CORE_COUNT"]) == (chip.cube_cores, chip.vector_cores), name


def test_chips_that_differ_in_name_alone_are_compiled_alike():
    finals = []
    for soc in ("Ascend910B3", "Ascend910B4", "Ascend910_9362"):
        finals.append(_rms_norm(2048, 4, soc=soc).stages["final"].replace(soc, "SOC"))
    assert finals[0] == finals[1] == finals[2]


def test_stages_are_there():
    stages = _rms_norm(2048, 4).stages
    assert "tt.func" in stages["ttir"]
    assert "linalg.reduce" in stages["linalg"]
    assert "hivm.hir.pointer_cast" in stages["final"]


def test_another_failure_than_overflow_is_an_error():
    with pytest.raises(CompilationError, match=r"bishengir-compile-a5 1\.2\.0 cannot compile best"):
        compile_kernel(best, {"x_ptr": "*fp32", "y_ptr": "*i32"}, {"BN": 64}, soc="Ascend950PR_9589")


def test_a_crash_without_a_word_is_said():
    frames = "PLEASE submit a bug report\nStack dump:\n #0 0x00005566 llvm::sys::PrintStackTrace (bishengir-compile+0x1)\n"
    assert reason(frames) == "it crashed, and said nothing but its stack frames"
    assert reason(frames + "kernel.mlir:3:1: error: no such operation") == "kernel.mlir:3:1: error: no such operation"


def test_second_time_comes_from_the_cache(empty_cache, monkeypatch):
    first = _rms_norm(1024, 2)
    monkeypatch.setattr(compilation, "_run", lambda *_: pytest.fail("compiled again"))
    assert _rms_norm(1024, 2) == first
    with pytest.raises(pytest.fail.Exception, match="compiled again"):
        _rms_norm(1024, 2, options={"multibuffer": False})
    assert len(list((empty_cache / "reports").iterdir())) == 1


def test_another_compilation_of_one_input_compiles_again(empty_cache, monkeypatch):
    ttir, linalg = compilation.front_end_of(compilation.as_record(rms_norm, SIGNATURE, {"D": 512, "BM": 2}, None))[1:]
    run, ran = compilation._run, []
    monkeypatch.setattr(compilation, "_run", lambda *given: ran.append(1) or run(*given))
    for number in (0, 1, 1, 0):
        assert compilation.compile_linalg("rms_norm", ttir, linalg, {}, "Ascend910B4", "1.2.0", number).fits
    assert len(ran) == 2


def test_processes_may_share_a_cache(empty_cache):
    ttir, linalg = compilation.front_end_of(compilation.as_record(rms_norm, SIGNATURE, {"D": 512, "BM": 2}, None))[1:]
    arguments = ("rms_norm", ttir, linalg, {}, "Ascend910B4", "1.2.0")
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        one, other = pool.starmap(compilation.compile_linalg, [arguments, arguments])
    assert one == other == _rms_norm(512, 2)


def test_report_survives_json():
    report = _rms_norm(2048, 4)
    assert Report.from_json(report.to_json()) == report


def test_recorded_launch_compiles_as_given():
    import torch

    x = torch.zeros(8, 2048, dtype=torch.bfloat16)
    with record() as launches:
        rms_norm[(40,)](x, x[0], x, 8, 1e-6, D=2048, BM=4)
    report = compile_kernel(launches[0])
    assert report.ub.used == _rms_norm(2048, 4).ub.used
    with pytest.raises(TypeError, match="must be left out"):
        compile_kernel(launches[0], SIGNATURE)


@triton.jit
def fill(y_ptr, n, BN: tl.constexpr):
    b_zeros = tl.zeros([BN], tl.float32)
    for i in tl.range(0, n):
        tl.store(y_ptr + i * BN + tl.arange(0, BN), b_zeros)


@triton.jit
def fill_with_numbers(y_ptr, n, BN: tl.constexpr):
    for i in tl.range(0, n):
        tl.store(y_ptr + i * BN + tl.arange(0, BN), tl.zeros([BN], tl.float32) + i)


@triton.jit
def fill_where_even(y_ptr, n, BN: tl.constexpr):
    b_zeros = tl.zeros([BN], tl.float32)
    for i in tl.range(0, n):
        if tl.load(y_ptr + i * BN) < 1.0:  # the loop becomes blocks and branches in some versions
            tl.store(y_ptr + i * BN + tl.arange(0, BN), b_zeros)
        else:
            for k in tl.range(i, n):
                tl.store(y_ptr + k * BN + tl.arange(0, BN), b_zeros)


@pytest.mark.parametrize(("soc", "toolchain"), [("Ascend910B4", "1.1.0"), ("Ascend950PR_957b", "1.2.0")])
def test_a_constant_that_a_loop_stores_needs_no_second_buffer(soc, toolchain):
    signature = {"y_ptr": "*fp32", "n": "i32"}

    def doubled(kernel, **options):
        compiled = compile_kernel(kernel, signature, {"BN": 1024}, soc=soc, toolchain=toolchain, options=options)
        return compiled.double_buffered

    assert doubled(fill) is not False  # True where the compiler fills the buffers anew
    assert doubled(fill_where_even) is not False
    assert doubled(fill_with_numbers) is True
    assert doubled(fill_with_numbers, multibuffer=False) is False
