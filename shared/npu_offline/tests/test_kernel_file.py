"""Commands on one kernel of a file that knows nothing of this package: `FILE::KERNEL NAME=VALUE ... --grid X`."""

import json

import pytest
from npu_offline.check import kernel_file
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


@triton.autotune([triton.Config({"BLOCK": 256}), triton.Config({"BLOCK": 512})], key=["n"])
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
        ("double", [*DOUBLE, "BLOCK=256", "MASKED=False"], "of argument x_ptr, outside its storage of 4000 bytes"),
        (
            "total",
            ["x_ptr=fp32:1000", "sum_ptr=fp32:1", "n=1000", "BLOCK=256", "--grid", "4"],
            "of argument sum_ptr, which program",
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
    assert "1 choices" in said
    assert "BLOCK=128" in said
    assert "BLOCK=4096" in said
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
    monkeypatch.setattr(kernel_file, "missing_triton_ascend", lambda: "triton-ascend is not installed")
    path = tmp_path / "calls_of_mine.py"
    path.write_text("VALUE = 3")

    def refused():
        raise AssertionError("recording needs triton-ascend")

    monkeypatch.setattr(kernel_file, "record", refused)
    assert kernel_file.load_file(path).VALUE == 3
