"""Commands on one kernel of a file that knows nothing of this package: `FILE::KERNEL NAME=VALUE ... --grid X`."""

import json
import subprocess
import sys

import pytest
import torch
from npu_offline.check import files
from npu_offline.cli import main

KERNELS = """
import torch_npu
import torch
import triton
import triton.language as tl


@triton.jit
def softmax(x_ptr, y_ptr, columns, BLOCK: tl.constexpr, OTHER: tl.constexpr = float("-inf")):
    row = tl.program_id(0)
    o = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + o, mask=o < columns, other=OTHER)
    e = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + row * columns + o, e / tl.sum(e, 0), mask=o < columns)


@triton.autotune([triton.Config({"BLOCK": 256}), triton.Config({"BLOCK": 512})], key=["n"], warmup=1)
@triton.jit
def double(x_ptr, y_ptr, n, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if MASKED:
        tl.store(y_ptr + o, tl.load(x_ptr + o, mask=o < n) * 2, mask=o < n)
    else:
        tl.store(y_ptr + o, tl.load(x_ptr + o) * 2)


@triton.jit
def total(x_ptr, sum_ptr, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(sum_ptr, tl.load(sum_ptr) + tl.sum(tl.load(x_ptr + o, mask=o < n, other=0.0), 0))


@triton.jit
def pick(x_ptr, index_ptr, y_ptr, D: tl.constexpr):
    row = tl.load(index_ptr + tl.program_id(0))
    o = tl.arange(0, D)
    tl.store(y_ptr + tl.program_id(0) * D + o, tl.load(x_ptr + row * D + o))


def on_chip():
    x = torch.empty(1000, device="cpu")
    y = torch.empty_like(x)
    double[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](x, y, 1000, MASKED=True)
    return x, y


def calls():
    yield "autotuned", on_chip


NEWEST
"""
SOFTMAX = ["x_ptr=fp32:6x200", "y_ptr=fp32:6x200", "columns=200", "BLOCK=256", "--grid", "6"]
DOUBLE = ["x_ptr=fp32:1000", "y_ptr=fp32:1000", "n=1000", "--grid", "cdiv(n,BLOCK)"]
NEWEST = ["--toolchain", "1.2.0"]


@pytest.fixture
def file(tmp_path):
    def make(last=""):
        path = tmp_path / "kernels.py"
        path.write_text(KERNELS.replace("NEWEST", last))
        return str(path)

    return make


def run(capsys, *arguments):
    status = main([*arguments])
    said = capsys.readouterr()
    return status, " ".join((said.out + said.err).replace("│", " ").split())


def test_a_right_kernel_computes_what_pytorch_does_at_every_level(file, capsys):
    status, said = run(capsys, "run", f"{file()}::softmax", *SOFTMAX, "--expect", "y_ptr=x_ptr.softmax(-1)")
    assert status == 0
    assert said.count("as expected") == 4
    assert "x_ptr 4,800 4,800 0 0 6 0" in said  # bytes read, distinct, written, distinct, transfers, scalars


@pytest.mark.parametrize(
    ("kernel", "given", "message"),
    [
        (
            "double",
            [*DOUBLE, "BLOCK=256", "MASKED=False"],
            "of argument x_ptr, outside its storage of 4000 bytes (kernels.py, line 24)",
        ),
        (
            "total",
            ["x_ptr=fp32:1000", "sum_ptr=fp32:1", "n=1000", "BLOCK=256", "--grid", "4"],
            "of argument sum_ptr (kernels.py, line 30), which program",
        ),
        ("softmax", [*SOFTMAX, "OTHER=0.0", "--expect", "y_ptr=x_ptr.softmax(-1)"], "elements of y_ptr are wrong: y_ptr[0,"),
        ("softmax", [*SOFTMAX, "--expect", "x_ptr=0*x_ptr"], "elements of x_ptr are wrong"),
        (
            "softmax",
            ["x_ptr=fp32:2x99", "y_ptr=fp32:2x99", "columns=99", "BLOCK=65536", "--grid", "2"],
            "ub overflow, requires",
        ),
    ],
)
def test_a_wrong_kernel_is_an_error_that_says_where(file, capsys, kernel, given, message):
    status, said = run(capsys, "run", f"{file()}::{kernel}", *given, *NEWEST)
    assert message in said
    assert status == 1


def test_elements_that_are_never_written_are_wrong(file, capsys):
    given = [*SOFTMAX[:-1], "5", "--expect", "y_ptr=x_ptr.softmax(-1)"]
    status, said = run(capsys, "run", f"{file()}::softmax", *given, *NEWEST)
    assert "200 of 1200 elements of y_ptr are wrong: y_ptr[5, 0] is nan" in said
    assert status == 1


@pytest.mark.parametrize(("below", "status"), [(10, 0), (1000, 1)])
def test_integers_are_random_below_the_number_that_is_given(file, capsys, below, status):
    given = f"x_ptr=bf16:10x64 index_ptr=i32:100:{below} y_ptr=bf16:100x64 D=64 --grid 100".split()
    assert run(capsys, "run", f"{file()}::pick", *given, "--linalg-only")[0] == status


def test_an_argument_may_follow_an_option(file, capsys):
    status, said = run(capsys, "run", f"{file()}::softmax", "--grid", "6", *SOFTMAX[:-2], "--linalg-only")
    assert "compared with nothing" in said
    assert status == 0


def test_autotuning_takes_its_first_configuration(file, capsys):
    status, said = run(capsys, "time", file(), *NEWEST)
    assert "BLOCK=256" in said
    assert status == 0


@pytest.mark.parametrize("last", ["double[(1,)](torch.empty(8, device='npu'))", "from os import nothing_of_this_name"])
def test_a_file_that_goes_on_to_run_its_kernels_on_a_chip_is_used_up_to_there(file, capsys, last):
    status, said = run(capsys, "run", f"{file(last)}::softmax", *SOFTMAX, "--linalg-only")
    assert status == 0
    assert "fails at line" in said


def test_check_lint_time_and_tune_take_the_same_arguments(file, capsys, tmp_path):
    where = ["--soc", "Ascend910B4", *NEWEST]
    status, said = run(capsys, "check", f"{file()}::softmax", *SOFTMAX, *where)
    assert "1 calls executed, 1 launches, 2 of 6 programs, 0 findings" in said
    assert status == 0
    status, said = run(capsys, "lint", f"{file()}::softmax", *SOFTMAX, *where, "--jobs", "1")
    assert "0 findings" in said
    assert status == 0
    found = tmp_path / "found.json"
    status, said = run(capsys, "time", f"{file()}::softmax", *SOFTMAX, *where, "--json", str(found))
    assert status == 0
    assert json.loads(found.read_text())[0]["estimate"] > 0
    given = [
        "x_ptr=fp32:100000",
        "y_ptr=fp32:100000",
        "n=100000",
        "BLOCK=128,4096",
        "MASKED=True",
        "--grid",
        "cdiv(n,BLOCK)",
    ]
    status, said = run(capsys, "tune", f"{file()}::double", *given, *where)
    assert "double: BLOCK=4096 is" in said
    assert "faster than BLOCK=128 (in use)" in said
    assert status == 1  # 4096 elements at a time take less than 128


@pytest.mark.parametrize(
    ("target", "given", "message"),
    [
        ("::softmax", [], "kernel softmax also needs x_ptr, y_ptr, columns, BLOCK"),
        ("::softmax", SOFTMAX[:-2], "--grid is missing"),
        ("::softmax", [*SOFTMAX, "rows=3"], "kernel softmax has no argument rows; it has x_ptr, y_ptr"),
        ("::softmax", [*SOFTMAX[:-1], "rows"], "--grid is 'rows'"),
        ("::softmax", [*SOFTMAX, "x_ptr=fp31:4"], "x_ptr is 'fp31:4'"),
        ("::softmax", [*SOFTMAX, "x_ptr=fp32:4xN"], "x_ptr is 'fp32:4xN'"),
        ("::softmax", [*SOFTMAX, "x_ptr=fp32:300,777"], "x_ptr is 'fp32:300,777': a tensor has one size"),
        ("::softmax", [*SOFTMAX, "x_ptr=fp32:4:negative"], "x_ptr is 'fp32:4:negative'"),
        ("::softmax", [*SOFTMAX, "x_ptr=no.npy"], "x_ptr is no.npy, which does not exist"),
        ("::double", [*DOUBLE], "also needs MASKED, of which its configurations give BLOCK"),
        ("::softmax", ["x_ptr"], "'x_ptr' is no argument"),
        ("::soft", [], "has no kernel 'soft'; it has softmax, double, total, pick"),
        ("", ["x_ptr=1"], "are for one kernel"),
        ("::softmax", [*SOFTMAX, "--expect", "z=1"], "must be TENSOR=EXPRESSION, TENSOR one of x_ptr, y_ptr"),
        ("::softmax", [*SOFTMAX, "--expect", "y_ptr=x_pt"], "--expect y_ptr: NameError"),
        ("::softmax", [*SOFTMAX, "--expect", "y_ptr=x_ptr.sum()"], "--expect y_ptr has shape (), must be (6, 200)"),
        ("::softmax", [*SOFTMAX[:-1], "cdiv(columns)"], "--grid is 'cdiv(columns)'"),
    ],
)
def test_a_mistake_in_the_call_is_said_before_anything_runs(file, capsys, target, given, message):
    status, said = run(capsys, "run", f"{file()}{target}", *given, "--linalg-only")
    assert message in said
    assert "what ran" not in said
    assert status == 2


def test_a_grid_may_call_triton_and_an_expectation_the_functions_of_the_file(file, capsys):
    path = file("def definition(x):\n    return x.softmax(-1)")
    given = [*SOFTMAX[:-1], "triton.cdiv(6, 1)", "--expect", "y_ptr=definition(x_ptr)"]
    status, said = run(capsys, "run", f"{path}::softmax", *given, "--linalg-only")
    assert "as expected" in said
    assert status == 0


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("positive", "torch.where(x_ptr > 0, x_ptr, torch.nan)"),
        ("zeros", "torch.zeros(512, dtype=torch.float64)"),
        ("ones", "torch.ones(512, dtype=torch.float64)"),
        ("2..3", "torch.where((x_ptr >= 2) & (x_ptr < 3), x_ptr, torch.nan)"),
    ],
)
def test_a_tensor_is_made_of_the_numbers_that_are_asked_for(file, capsys, content, expected):
    given = f"x_ptr=fp32:512:{content} y_ptr=fp32:512 n=512 BLOCK=512 MASKED=True --grid 1".split()
    status, said = run(capsys, "run", f"{file()}::double", *given, "--linalg-only", "--expect", f"y_ptr=2*({expected})")
    assert status == 0, said


@pytest.mark.parametrize("kind", ["npy", "safetensors"])
def test_a_tensor_is_read_from_a_file(file, capsys, tmp_path, kind):
    numbers = torch.arange(512.0)
    path = tmp_path / f"x.{kind}"
    if kind == "npy":
        pytest.importorskip("numpy").save(path, numbers.numpy())
    else:
        pytest.importorskip("safetensors.torch").save_file({"w": numbers}, path)
    x = f"x_ptr={path}" if kind == "npy" else f"x_ptr={path}:w"
    given = [x, *["y_ptr=fp32:512", "n=512", "BLOCK=512", "MASKED=True", "--grid", "1"]]
    status, said = run(
        capsys, "run", f"{file()}::double", *given, "--linalg-only", "--expect", "y_ptr=2*torch.arange(512).double()"
    )
    assert status == 0, said


def test_each_configuration_of_an_autotuned_kernel_is_run_and_ranked(file, capsys):
    given = ["x_ptr=fp32:99999", "y_ptr=fp32:99999", "n=99999", "MASKED=True", "--grid", "cdiv(n,BLOCK)"]
    status, said = run(capsys, "run", f"{file()}::double", *given, "--linalg-only", "--expect", "y_ptr=2*x_ptr")
    assert "double BLOCK=256" in said
    assert "double BLOCK=512" in said
    assert said.count("as expected") == 2
    assert status == 0
    status, said = run(capsys, "tune", f"{file()}::double", *given, *NEWEST)
    assert "double: BLOCK=512 is" in said
    assert status == 1


def test_heuristics_are_computed(file, capsys):
    path = file(
        """
@triton.heuristics({"MASKED": lambda arguments: arguments["n"] % arguments["BLOCK"] != 0})
@triton.jit
def guessed(x_ptr, y_ptr, n, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if MASKED:
        tl.store(y_ptr + o, tl.load(x_ptr + o, mask=o < n), mask=o < n)
    else:
        tl.store(y_ptr + o, tl.load(x_ptr + o))
"""
    )
    given = ["x_ptr=fp32:1000", "y_ptr=fp32:1000", "n=1000", "BLOCK=256", "--grid", "cdiv(n,BLOCK)"]
    assert run(capsys, "run", f"{path}::guessed", *given, "--linalg-only", "--expect", "y_ptr=x_ptr")[0] == 0


@pytest.mark.parametrize("first", ["", "raise ImportError('no such backend')"])
def test_a_file_of_a_package_has_relative_imports(capsys, tmp_path, first):
    folder = tmp_path / ("broken" if first else "whole") / "inner"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text(first)
    (folder / "__init__.py").touch()
    (folder.parent / "helpers.py").write_text("import triton\n@triton.jit\ndef twice(x):\n    return x * 2\n")
    kernel = "from ..helpers import twice\n" + KERNELS.replace("tl.load(x_ptr + o) * 2", "twice(tl.load(x_ptr + o))")
    (folder / "kernels.py").write_text(kernel.replace("NEWEST", ""))
    given = [
        "x_ptr=fp32:512",
        "y_ptr=fp32:512",
        "n=512",
        "BLOCK=512",
        "MASKED=False",
        "--grid",
        "1",
        "--expect",
        "y_ptr=2*x_ptr",
    ]
    status, said = run(capsys, "run", f"{folder / 'kernels.py'}::double", *given, "--linalg-only")
    assert status == 0, said


def test_a_sum_with_cancellation_may_round_as_its_largest_numbers_do(file, capsys):
    path = file(
        "@triton.jit\ndef running(x_ptr, y_ptr, BLOCK: tl.constexpr):\n"
        "    o = tl.arange(0, BLOCK)\n    tl.store(y_ptr + o, tl.cumsum(tl.load(x_ptr + o), 0))"
    )
    given = ["x_ptr=fp32:4096", "y_ptr=fp32:4096", "BLOCK=4096", "--grid", "1", "--linalg-only"]
    assert run(capsys, "run", f"{path}::running", *given, "--expect", "y_ptr=x_ptr.cumsum(0)")[0] == 0
    status, said = run(capsys, "run", f"{path}::running", *given, "--expect", "y_ptr=x_ptr.cumsum(0)", "--atol", "1e-7")
    assert "elements of y_ptr are wrong" in said
    assert status == 1


def test_functions_of_libdevice_without_a_body_are_refused_with_what_to_import(file, capsys):
    path = file(
        "from triton.language.extra import libdevice\n@triton.jit\ndef root(x_ptr, BLOCK: tl.constexpr):\n"
        "    o = tl.arange(0, BLOCK)\n    tl.store(x_ptr + o, libdevice.rsqrt(tl.load(x_ptr + o)))"
    )
    status, said = run(capsys, "run", f"{path}::root", "x_ptr=fp32:64", "BLOCK=64", "--grid", "1", "--linalg-only")
    assert "import them from triton.language.extra.ascend.libdevice" in said
    assert status == 2


def test_autotuned_kernels_can_be_imported_before_anything_is_emulated(tmp_path):
    path = tmp_path / "kernels.py"
    calls = "with emulate():\n    on_chip()\non_chip()"
    path.write_text("from npu_offline import emulate\n" + KERNELS.replace("import torch_npu", "").replace("NEWEST", calls))
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True)
    assert "launch kernels inside `with npu_offline.emulate():`" in done.stderr
    assert done.stderr.rstrip().count("on_chip()") == 1, done.stderr  # the second call


def test_a_file_without_calls_says_what_to_write(file, capsys):
    path = file("del calls")
    status, said = run(capsys, "check", path)
    assert f"name a kernel: {path}::KERNEL, KERNEL one of softmax, double, total, pick" in said
    assert status == 2


def test_nothing_to_tune_is_an_error(file, capsys):
    status, said = run(capsys, "tune", f"{file()}::softmax", *SOFTMAX)
    assert "BLOCK=1024,512,2048" in said
    assert status == 2


def test_what_triton_refuses_is_one_message(file, capsys):
    path = file("@triton.jit\ndef unknown(x_ptr):\n    tl.store(x_ptr, nothing_of_this_name)")
    status, said = run(capsys, "run", f"{path}::unknown", "x_ptr=fp32:4", "--grid", "1", "--linalg-only")
    assert "Triton refuses the kernel" in said
    assert "nothing_of_this_name is not defined" in said
    assert status == 2


def test_a_file_loads_without_triton_ascend(monkeypatch, tmp_path):
    """On a CUDA machine, where operators' tests load calls that only an Ascend compiler is given."""
    monkeypatch.setattr(files, "missing_triton_ascend", lambda: "triton-ascend is not installed")
    path = tmp_path / "calls_of_mine.py"
    path.write_text("VALUE = 3")

    def refused():
        raise AssertionError("recording needs triton-ascend")

    monkeypatch.setattr(files, "record", refused)
    assert files.load_file(path).VALUE == 3
