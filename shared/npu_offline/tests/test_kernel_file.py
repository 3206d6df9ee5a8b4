"""Commands on one kernel of a file that knows nothing of this package: `FILE::KERNEL NAME=VALUE ... --grid X`."""

import json

import pytest
from npu_offline.check import files
from user_kernels import DOUBLE, KERNELS, NEWEST, SOFTMAX, run

from testing import forks


def test_a_right_kernel_computes_what_pytorch_does_at_every_level(file, capsys):
    status, said = run(capsys, "run", f"{file()}::softmax", *SOFTMAX, "--expect", "y_ptr=x_ptr.softmax(-1)")
    assert status == 0
    assert said.count("as expected") == 6  # TTIR, Linalg IR, three modules, and the verdict
    assert "x_ptr 4,800 4,800 0 0 6 0" in said  # bytes read, distinct, written, distinct, transfers, scalars


@pytest.mark.parametrize(
    ("kernel", "given", "message"),
    [
        (
            "double",
            [*DOUBLE, "BLOCK=256", "MASKED=False"],
            "of argument x_ptr, outside its storage of 4000 bytes (kernels.py:24:",
        ),
        (
            "total",
            ["x_ptr=fp32:1000", "sum_ptr=fp32:1", "n=1000", "BLOCK=256", "--grid", "4"],
            "of argument sum_ptr (kernels.py:30:",  # which of the others comes first is chance
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
    assert "200 of 1200 elements of y_ptr are wrong: y_ptr[5, 0] was not written" in said
    assert status == 1


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
    assert "double: BLOCK=4096 takes" in said
    assert "less time than BLOCK=128 (in use)" in said
    assert status == 1  # 4096 elements at a time take less than 128


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
    done = forks.run(path)
    assert "launch kernels inside `with npu_offline.emulate():`" in done.stderr
    assert done.stderr.rstrip().count("on_chip()") == 1, done.stderr  # the second call


def test_a_file_may_define_dataclasses(file, capsys):
    path = file("from dataclasses import dataclass\n@dataclass\nclass Sizes:\n    n: 'int' = 0")
    status, said = run(capsys, "run", f"{path}::softmax", *SOFTMAX, "--linalg-only")
    assert status == 0
    assert "fails" not in said


def test_a_file_without_calls_says_what_to_write(file, capsys):
    path = file("del calls")
    status, said = run(capsys, "check", path)
    assert f"name a kernel: {path}::KERNEL, KERNEL one of softmax, double, total, pick" in said
    assert status == 2


def test_a_file_without_calls_is_imported_once(file, capsys):
    _, said = run(capsys, "run", file("del calls\nprint('imported')"))
    assert said.count("imported") == 1


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


def test_the_file_of_a_check_has_its_findings(file, capsys, tmp_path):
    report = tmp_path / "found.json"
    given = ["x_ptr=fp32:1000", "sum_ptr=fp32:1", "n=1000", "BLOCK=256", "--grid", "4", "--soc", "Ascend910B4", *NEWEST]
    status, _ = run(capsys, "check", f"{file()}::total", *given, "--json", str(report))
    found = json.loads(report.read_text())
    assert status == 1
    assert [each["kernel"] for each in found["findings"]] == ["total"]
    assert "of argument sum_ptr" in found["findings"][0]["finding"]
    assert [each["fits"] for each in found["compilations"]] == [True]


def test_a_file_that_cannot_be_written_is_named(file, capsys, tmp_path):
    where = ["--soc", "Ascend910B4", *NEWEST]
    status, said = run(
        capsys, "time", f"{file()}::softmax", *SOFTMAX, *where, "--json", str(tmp_path / "none" / "found.json")
    )
    assert status == 2
    assert "which cannot be written: No such file or directory" in said


def test_a_folder_that_cannot_be_written_is_named(file, capsys, tmp_path):
    (tmp_path / "taken").write_text("a file")
    inside = str(tmp_path / "taken" / "folder")
    where = ["--soc", "Ascend910B4", *NEWEST]
    status, said = run(capsys, "run", f"{file()}::softmax", *SOFTMAX, *where, "--picture", inside)
    assert status == 2
    assert f"--picture is '{inside}', which cannot be written: Not a directory" in said
    status, said = run(capsys, "report", str(tmp_path), "--output", inside)
    assert status == 2
    assert f"--output is '{inside}', which cannot be written: Not a directory" in said


def test_a_refused_call_leaves_the_others_to_lint_and_time(file, capsys, tmp_path):
    calls = "def calls():\n    yield 'bad', lambda: softmax[(1,)](1)\n"
    calls += "    yield 'good', lambda: softmax[(6,)](*torch.ones(2, 6, 200), 200, BLOCK=256)\n"
    report = tmp_path / "lint.json"
    lint, time = ("lint", "--jobs", "1", "--json", str(report)), ("time",)
    for (command, *options), good in ((lint, "1 launches, 30 rules, 0 findings"), (time, "BLOCK=256")):
        status, said = run(capsys, command, file(calls), *options, "--soc", "Ascend910B4", *NEWEST)
        assert "bad: refused: " in said
        assert good in said
        assert status == 2
    found = json.loads(report.read_text())
    assert [each["call"] for each in found["refused"]] == ["bad"]
    assert [each["kernel"] for each in found["launches"]] == ["softmax"]


def test_a_grid_knows_default_sizes(file, capsys):
    kernel = "@triton.jit\ndef fill(x_ptr, n, BLOCK: tl.constexpr = 256):\n"
    kernel += "    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n    tl.store(x_ptr + o, 1.0, mask=o < n)\n"
    given = ["x_ptr=fp32:1000", "n=1000", "--grid", "cdiv(n, BLOCK)", "--expect", "x_ptr=1+0*x_ptr", "--linalg-only"]
    status, said = run(capsys, "run", f"{file(kernel)}::fill", *given)
    assert status == 0, said
