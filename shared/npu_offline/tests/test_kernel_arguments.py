"""What a user may write for a kernel's arguments, its grid and what is expected: `NAME=VALUE ... --grid X --expect Y=Z`."""

import pytest
import torch
from user_kernels import DOUBLE, NEWEST, SOFTMAX, run


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


NUMBERED = """
from triton.language import program_id as number

@triton.jit
def place(N: tl.constexpr):
    return number(0) * N

@triton.jit
def copy(x, y, N: tl.constexpr):
    o = {} + tl.arange(0, N)
    tl.store(y + o, tl.load(x + o))
"""


@pytest.mark.parametrize(("place", "said"), [("0", "--grid is 1: "), ("place(N)", "--grid is missing")])
def test_a_kernel_that_does_not_ask_which_program_it_is_needs_no_grid(file, capsys, place, said):
    given = ["x=fp32:64", "y=fp32:64", "N=64", "--expect", "y=x", "--linalg-only"]
    status, printed = run(capsys, "run", f"{file(NUMBERED.format(place))}::copy", *given)
    assert said in printed
    assert status == (0 if place == "0" else 2)


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


def test_integers_are_compared_exactly(file, capsys):
    given = f"x_ptr=i64:512:{2**60}..{2**60 + 1} y_ptr=i64:512 n=512 BLOCK=512 MASKED=True --grid 1 --linalg-only".split()
    assert run(capsys, "run", f"{file()}::double", *given, "--expect", "y_ptr=2*x_ptr")[0] == 0
    status, said = run(capsys, "run", f"{file()}::double", *given, "--expect", "y_ptr=2*x_ptr+1")
    assert f"512 of 512 elements of y_ptr are wrong: y_ptr[0] is {2**61}, must be {2**61 + 1}" in said
    assert status == 1


def test_a_file_may_import_the_modules_of_later_releases(file, capsys):
    status, said = run(
        capsys, "run", f"{file('from triton.language.extra.cann import libdevice')}::softmax", *SOFTMAX, *NEWEST
    )
    assert "fails" not in said
    assert status == 0


def test_a_kernel_that_is_compiled_for_debugging_is_refused(file, capsys, monkeypatch):
    monkeypatch.setenv("TRITON_DEBUG", "1")
    status, said = run(capsys, "run", f"{file()}::softmax", *SOFTMAX, "--linalg-only")
    assert "TRITON_DEBUG is set, and tl.device_assert cannot be run: unset it" in said
    assert status == 2


def test_sizes_are_ranked_where_those_in_use_do_not_fit(file, capsys):
    given = ["x_ptr=fp32:2x99", "y_ptr=fp32:2x99", "columns=99", "BLOCK=65536,128,256", "--grid", "2"]
    status, said = run(capsys, "tune", f"{file()}::softmax", *given)
    assert "is the fastest that can be timed; BLOCK=65536 (in use): softmax does not fit on Ascend910B4" in said
    assert status == 1


@pytest.mark.parametrize(("content", "status"), [(":zeros", 0), ("", 1)])
def test_a_result_begins_with_what_its_argument_says_or_with_nan(file, capsys, content, status):
    given = f"x_ptr=fp32:256 y_ptr=fp32:512{content} n=256 BLOCK=256 MASKED=True --grid 1 --linalg-only".split()
    expected = "y_ptr=torch.cat((2*x_ptr,0*x_ptr))"  # the kernel leaves the second half alone
    assert run(capsys, "run", f"{file()}::double", *given, "--expect", expected)[0] == status


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
    assert said.count("as expected") == 2 * 3  # TTIR, Linalg IR, and the verdict
    assert status == 0
    status, said = run(capsys, "tune", f"{file()}::double", *given, *NEWEST)
    assert "double: BLOCK=512 takes" in said
    assert status == 1


def test_configurations_that_differ_in_what_ascend_ignores_are_one(file, capsys):
    tuned = "@triton.autotune([triton.Config({'BLOCK': 64}, num_warps=4), triton.Config({'BLOCK': 64}, num_stages=3),\n"
    tuned += "    triton.Config({'BLOCK': 128}, num_warps=8)], key=['n'])\n@triton.jit\n"
    tuned += "def copied(x_ptr, y_ptr, n, BLOCK: tl.constexpr):\n    o = tl.arange(0, BLOCK)\n"
    tuned += "    tl.store(y_ptr + o, tl.load(x_ptr + o, mask=o < n), mask=o < n)\n"
    given = ["x_ptr=fp32:64", "y_ptr=fp32:64", "n=64", "--grid", "1", "--linalg-only"]
    path = file(tuned)
    assert run(capsys, "run", f"{path}::copied", *given)[1].count("what ran") == 2
    assert run(capsys, "run", f"{path}::copied", *given, "BLOCK=64")[1].count("what ran") == 1


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


OF_CHANCE = """
@triton.jit
def other_one(a_ptr, b_ptr, y_ptr, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(y_ptr + o, tl.load(a_ptr + o))


@triton.jit
def largest(x_ptr, y_ptr, n, BLOCK: tl.constexpr, OTHER: tl.constexpr):
    o = tl.arange(0, BLOCK)
    row = tl.program_id(0)
    tl.store(y_ptr + row, tl.max(tl.load(x_ptr + row * n + o, mask=o < n, other=OTHER), 0))


@triton.jit
def least(x_ptr, y_ptr, n, BLOCK: tl.constexpr, OTHER: tl.constexpr):
    o = tl.arange(0, BLOCK)
    row = tl.program_id(0)
    tl.store(y_ptr + row, tl.min(tl.load(x_ptr + row * n + o, mask=o < n, other=OTHER), 0))
"""


@pytest.mark.parametrize("tensor", ["fp32:64", "bf16:64", "fp32:64:0..1", "fp32:64:positive", "i32:64:1000", "i8:64"])
def test_a_kernel_that_reads_the_wrong_one_of_two_tensors_of_one_shape_is_wrong(file, capsys, tensor):
    given = [f"a_ptr={tensor}", f"b_ptr={tensor}", f"y_ptr={tensor}", "BLOCK=64", "--grid", "1", "--linalg-only"]
    target = f"{file(OF_CHANCE)}::other_one"
    assert run(capsys, "run", target, *given, "--expect", "y_ptr=b_ptr")[0] == 1
    assert run(capsys, "run", target, *given, "--expect", "y_ptr=a_ptr")[0] == 0


@pytest.mark.parametrize(("other", "status"), [("0.0", 1), (None, 0)])
@pytest.mark.parametrize(
    ("kernel", "computed", "neutral", "wrong"),
    [
        ("largest", "amax", "-inf", "below zero: {} must be -"),
        ("least", "amin", "inf", "above zero, up to 200: {} must be "),
    ],
)
def test_what_numbers_of_both_signs_hide_is_seen_with_one(file, capsys, kernel, computed, neutral, wrong, other, status):
    given = ["x_ptr=fp32:8x100", "y_ptr=fp32:8", "n=100", "BLOCK=128", f"OTHER={other or neutral}", "--grid", "8", *NEWEST]
    got, said = run(capsys, "run", f"{file(OF_CHANCE)}::{kernel}", *given, "--expect", f"y_ptr=x_ptr.{computed}(-1)")
    assert got == status
    assert said.count(wrong.format("8 of 8 elements of y_ptr are wrong: y_ptr[0] is 0,")) == 4 * status
