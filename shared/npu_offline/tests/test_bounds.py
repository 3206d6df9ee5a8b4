"""`npu-offline bounds`: proofs for all sizes, counterexamples that really are out of bounds, and refusals by name."""

import re
import shlex
from pathlib import Path

import pytest
from npu_offline.cli import main

z3 = pytest.importorskip("z3", reason="needs z3-solver: pip install 'npu-offline[bounds]'")

from npu_offline.bounds.arithmetic import term_of  # noqa: E402
from npu_offline.bounds.kernel import prove  # noqa: E402
from npu_offline.bounds.question import Question  # noqa: E402
from npu_offline.check.bounded import subject_of  # noqa: E402
from npu_offline.module.mlir import make  # noqa: E402

FILE = Path(__file__).with_name("bounds_kernels.py")
ROWS = "n_rows=1..65536 n_cols=1..65536 y=fp32:n_rows*n_cols BLOCK_M=16 BLOCK_N=64"
TILES = "--grid=cdiv(n_rows,BLOCK_M),cdiv(n_cols,BLOCK_N)"
VECTOR = "n=1..2**31 x=fp32:n y=fp32:n BLOCK=256 --grid=cdiv(n,BLOCK)"
TABLE = "V=1..2**20 T=1..65536 n_cols=1..4096 table=fp32:V*n_cols out=fp32:T*n_cols BLOCK=4096 --grid=T"
SQUARE = "n_rows=1..9 n_cols=1..9 x=fp32:n_rows*n_cols y=fp32:n_rows*n_cols BLOCK=8 --grid=1"


def verdicts(kernel, line, where=()):
    words = line.split()
    (grid,) = (word.removeprefix("--grid=") for word in words if word.startswith("--grid="))
    given = [word for word in words if not word.startswith("--")]
    return list(prove(subject_of(f"{FILE}::{kernel}", given, grid, where)))


PROVED = {
    "add": "n=1..2**31 x=fp32:n y=fp32:n out=fp32:n BLOCK=1024 --grid=cdiv(n,BLOCK)",
    "rows": f"{ROWS} s_x=n_cols x=fp32:n_rows*n_cols WIDE=True {TILES}",
    "columns": "n_rows=1..65536 n_cols=1..65536 x=fp32:n_rows*n_cols y=fp32:n_rows BLOCK=256 STOP=0 --grid=n_rows",
    "strided": "n=1..2**31 x=fp32:n y=fp32:n BLOCK=1024 --grid=min(cores,n)",
    "grouped": "n_rows=1..16384 n_cols=1..16384 y=fp32:n_rows*n_cols BLOCK=64 GROUP=8"
    " --grid=cdiv(n_rows,BLOCK)*cdiv(n_cols,BLOCK)",
    "gather": f"{TABLE} ids=i64:T:V",
    "positive": VECTOR,
    "blocks": "n_rows=1..65536 n_cols=1..32768 x=fp32:n_rows*n_cols y=fp32:n_rows BLOCK_M=16 BLOCK_N=64 BOTH=True"
    " --grid=cdiv(n_rows,BLOCK_M)",
    "transposed": SQUARE,
    "returns": "n=1..2**20 x=fp32:n y=fp32:n limit=cdiv(n,BLOCK) BLOCK=64 --grid=cores",
}


@pytest.mark.parametrize("kernel", PROVED)
def test_right_kernels_are_proved(kernel):
    found = verdicts(kernel, PROVED[kernel])
    assert [(each.kind, each.reason) for each in found] == [("proved", "")] * len(found)
    assert found


WRONG = {
    "no_mask": (VECTOR, "store y", {"n": 1}, 1),
    "one_too_many": (VECTOR, "load x", {"n": 1}, 1),
    "less_or_equal": (VECTOR, "store y", {"n": 1}, 1),
    "columns": (
        "n_rows=1..9 n_cols=1..9 x=fp32:n_rows*n_cols y=fp32:n_rows BLOCK=4 STOP=1 --grid=n_rows",
        "load x",
        {"n_rows": 1, "n_cols": 1},
        1,
    ),
    "rows": (
        f"{ROWS} s_x=1..2**20 x=fp32:(n_rows-1)*n_cols+n_cols WIDE=True {TILES}",
        "load x",
        {"n_rows": 2, "n_cols": 1, "s_x": 2},
        2,
    ),
    "returns": (
        "n=1..9 x=fp32:n y=fp32:2*n limit=cdiv(n,BLOCK)+1 BLOCK=2 --grid=limit",
        "load x",
        {"n": 1},
        1,
    ),
    "blocks": (
        "n_rows=1..9 n_cols=1..9 x=fp32:n_rows*n_cols y=fp32:n_rows BLOCK_M=8 BLOCK_N=8 BOTH=False --grid=1",
        "load x",
        {"n_rows": 1, "n_cols": 1},
        1,
    ),
}


@pytest.mark.parametrize("kernel", WRONG)
def test_wrong_kernels_have_a_smallest_counterexample_that_is_out_of_bounds_when_it_runs(kernel, capsys):
    line, access, sizes, element = WRONG[kernel]
    found = [each for each in verdicts(kernel, line) if each.kind != "proved"]
    assert [f"{each.access.kind} {each.access.argument}" for each in found] == [access]
    (verdict,) = found
    assert verdict.kind == "out of bounds"
    assert verdict.counterexample.sizes == sizes
    assert verdict.counterexample.element >= verdict.counterexample.extents[access.split()[1]] == element
    assert main(["bounds", f"{FILE}::{kernel}", *line.split()]) == 1
    (command,) = re.findall("to see it: npu-offline (.*)", capsys.readouterr().out)
    assert main(shlex.split(command)) == 1
    ran = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"of argument {access.split()[1]}, outside its storage" in ran
    assert verdict.access.place in ran


def test_offsets_too_large_for_32_bits_are_a_counterexample():
    line = f"{ROWS} s_x=n_cols x=fp32:n_rows*n_cols WIDE=False {TILES}"
    (load, store) = verdicts("rows", line)
    assert (load.kind, store.kind) == ("out of bounds", "proved")
    found = load.counterexample
    assert found.element < 0
    assert found.sizes["n_rows"] * found.sizes["n_cols"] > 2**31
    line_of_product = next(
        number for number, text in enumerate(FILE.read_text().splitlines(), 1) if "else o_row * s_x" in text
    )
    assert re.fullmatch(rf"2,\d+,\d+,\d+ in bounds_kernels.py:{line_of_product}:\d+ is too large for i32", found.overflow)


def test_a_tensor_larger_than_an_offset_is_in_bounds_and_wrong():
    """The offset that 32 bits hold is inside; it is another element's."""
    line = "n=1..2**31 x=fp32:2**33 y=fp32:2**33 BLOCK=65536 --grid=65535"
    assert {each.kind for each in verdicts("no_mask", line)} == {"out of bounds"}
    (verdict,) = verdicts("branch", "n=0..1 y=fp32:2**33 BLOCK=131072 --grid=65535", ["n == 0"])
    assert (verdict.kind, verdict.counterexample.element) == ("out of bounds", -(2**31))


def test_a_branch_does_not_hide_what_overflows_in_its_condition():
    (verdict,) = verdicts("branch", "n=1..1000 y=fp32:n BLOCK=65536 --grid=65535")
    assert verdict.kind == "out of bounds"
    assert verdict.counterexample.program[0] * 65536 >= 2**31


def test_a_loop_whose_counter_overflows_goes_on():
    assert [each.kind for each in verdicts("long_loop", "n=1..2**30 x=fp32:n y=fp32:1 BLOCK=1024 --grid=1")] == [
        "proved"
    ] * 2
    load, _ = verdicts("long_loop", "n=1..2**31 x=fp32:n y=fp32:1 BLOCK=1024 --grid=1")
    assert load.kind == "out of bounds"
    assert load.counterexample.sizes["n"] > 2**31 - 1024
    assert load.counterexample.overflow.startswith("2,147,483,648 in bounds_kernels.py:")


def test_numbers_after_a_loop_are_as_large_as_its_turns_make_them():
    tiles = "n=1..65536 y=fp32:256 BLOCK=256 --grid=1"
    assert [each.kind for each in verdicts("after_loop", f"{tiles} x=fp32:cdiv(n,BLOCK)*BLOCK")] == ["proved"] * 2
    load, store = verdicts("after_loop", f"{tiles} x=fp32:n")
    assert (load.kind, load.counterexample.sizes, store.kind) == ("out of bounds", {"n": 1}, "proved")


def test_what_depends_on_data_is_refused_by_name():
    found = verdicts("gather", f"{TABLE} ids=i64:T")
    assert [each.kind for each in found] == ["proved", "refused", "proved"]
    assert re.fullmatch(r"it depends on values of ids \(bounds_kernels.py:\d+:\d+\)", found[1].reason)


def test_declared_integers_are_part_of_the_counterexample():
    found = verdicts("gather", f"{TABLE} ids=i64:T:-1..V")
    assert [each.kind for each in found] == ["proved", "out of bounds", "proved"]
    assert list(found[1].counterexample.data.values()) == [-1]


def test_a_while_loop_is_refused_by_name():
    (verdict,) = verdicts("doubled_while", "n=1..1000 y=fp32:n --grid=1")
    assert verdict.kind == "refused"
    assert "depends on what a loop or branch computes (bounds_kernels.py:" in verdict.reason


def test_an_access_that_no_program_reaches_says_so():
    (verdict,) = verdicts("branch", "n=0..1 y=fp32:1 BLOCK=16 --grid=4")
    assert (verdict.kind, verdict.reason) == ("proved", "no program gets here")


def test_exit_statuses_are_those_of_the_other_commands(capsys):
    assert main(["bounds", f"{FILE}::add", *PROVED["add"].split()]) == 0
    assert "3 accesses: 3 proved, 0 wrong, 0 refused" in capsys.readouterr().out
    assert main(["bounds", f"{FILE}::gather", *TABLE.split(), "ids=i64:T"]) == 2
    assert "3 accesses: 2 proved, 0 wrong, 1 refused" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("n=1..9 x=fp32:m y=fp32:n BLOCK=8 --grid=1", "m is no size; there are"),
        ("n=1..9 m=1..9 x=fp32:nxm y=fp32:n BLOCK=8 --grid=1", "nxm is no size; there are n, m, BLOCK: a product is n*m"),
        ("n=1..9 y=fp32:n BLOCK=8 --grid=1", "also needs x"),
        ("n=1..9 x=fp32:n y=fp32:n BLOCK=8", "--grid is missing"),
        ("n=9..1 x=fp32:n y=fp32:n BLOCK=8 --grid=1", "must have a number"),
        ("n=1..2**40 x=fp32:n y=fp32:n BLOCK=8 --grid=1", "check 1..2**31 and 2**31..1099511627776 apart"),
        ("n=1..9 x=fp32:n/2 y=fp32:n BLOCK=8 --grid=1", "must be of sizes"),
        ("n=1..9 x=fp32:n y=fp32:n BLOCK=8 --grid=0", "no sizes fulfil"),
        ("n=1..9 x=fp32:n y=fp32:n BLOCK=8 --grid=1 --where=n>9", "no sizes fulfil"),
        ("m=5 n=1..9 x=fp32:n y=fp32:n BLOCK=8 --grid=1", "the kernel has no argument m"),
    ],
)
def test_mistakes_in_the_call_are_named(line, said, capsys):
    assert main(["bounds", f"{FILE}::no_mask", *line.split()]) == 2
    assert said in capsys.readouterr().err


def wrapped(number, bits=32):
    return (number + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


def towards_zero(left, right):
    return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)


OPERATIONS = {
    "addi": lambda a, b: a + b,
    "subi": lambda a, b: a - b,
    "muli": lambda a, b: a * b,
    "divsi": towards_zero,
    "remsi": lambda a, b: a - towards_zero(a, b) * b,
    "divui": lambda a, b: (a % 2**32) // (b % 2**32),
    "remui": lambda a, b: (a % 2**32) % (b % 2**32),
    "floordivsi": lambda a, b: a // b,
    "ceildivsi": lambda a, b: -(-a // b),
    "minsi": min,
    "maxsi": max,
    "minui": lambda a, b: min(a % 2**32, b % 2**32),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_integers_are_those_of_32_bits(name):
    """A solver that is asked for the result has one answer, the one of a processor."""
    op = make(f"arith.{name}")
    for left in (-(2**31), -7, -1, 0, 5, 2**31 - 1):
        for right in (-3, -1, 2, 7, 2**30):
            question = Question((), wrapping=[op])
            term = term_of(question, op, name, 32, 32, [z3.IntVal(left), z3.IntVal(right)])
            solver = z3.Solver()
            solver.add(*question.facts)
            solver.add(term != wrapped(OPERATIONS[name](left, right)))
            assert solver.check() == z3.unsat, (left, right)


PACKAGES = Path(__file__).parents[3] / "packages"
needs_packages = pytest.mark.skipif(not PACKAGES.is_dir(), reason="needs the repository: the kernel is another package's")


@needs_packages
def test_rms_norm_forward_of_ascend_is_proved_for_every_number_of_rows():
    kernel = PACKAGES / "rms_norm/src/npu_rms_norm/ascend.py"
    absent = ["p_residual", "p_gate", "p_bias", "p_sum", "p_fp32", "p_scale"]
    unused = ["s_x_outer", "s_extra_outer", "s_extra_inner"]
    given = [
        "n_inner=1..2**31 s_x_inner=123..2**20 n_outer=1 eps=1e-6 offset=0.0",
        "p_x=bf16:(n_inner-1)*s_x_inner+123 p_weight=bf16:123 p_y=bf16:n_inner*123 p_rstd=fp32:n_inner",
        "N=123 G=1 M=24 BLOCK_N=128 SPLIT=rows NORMALISED=fp32 FACTORS=fp32 WEIGHTED=fp32 ACTIVATION=silu GATE_FIRST=False",
        *(f"{name}=None" for name in absent),
        *(f"{name}=0" for name in unused),
    ]
    subject = subject_of(f"{kernel}::forward_kernel", " ".join(given).split(), "min(cores, n_inner)", ())
    found = [(each.access.kind, each.access.argument, each.kind, each.reason) for each in prove(subject)]
    accesses = [("load", "p_weight"), ("load", "p_x"), ("store", "p_rstd"), ("store", "p_y")]
    assert found == [(*each, "proved", "") for each in accesses]


@needs_packages
def test_embedding_of_ascend_is_proved_for_any_indices():
    """The indices are data of which nothing is declared: the kernel checks them."""
    kernel = PACKAGES / "embedding/src/npu_embedding/lookup/ascend.py"
    given = [
        "n=1..2**31 n_total=1..2**24 p_index=i64:n p_weight=i16:n_total*128 p_out=i16:n*128",
        "first_row=0 stop_row=n_total s_weight=128 N=128 BLOCK_M=32 BLOCK_N=128 GATHER=False NAN=32704",
    ]
    subject = subject_of(f"{kernel}::gather_rows_kernel", " ".join(given).split(), "cores", ())
    found = list(prove(subject))
    assert {each.access.argument for each in found} == {"p_index", "p_weight", "p_out"}
    assert {each.kind for each in found} == {"proved"}
