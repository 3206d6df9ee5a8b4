"""`run` names who is wrong, the kernel, the front end or a compiler; TTIR is executed as Triton defines it."""

import json
import re
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from culprit_kernels import add_to_each, divided, doubled, products_of_a_group, states
from npu_offline import emulate
from npu_offline.cli import main
from npu_offline.errors import OutOfBoundsError, RaceError, UnsupportedError
from npu_offline.execute.meaning.compare import undefined, unlike

from testing import forks

FILE = Path(__file__).with_name("culprit_kernels.py")
FRONT_END, COMPILERS = (
    "triton-ascend's front end is wrong: ",
    "the compiler of CANN 8.5 (1.0.0), CANN 9.0 (1.1.0), about CANN 9.1 (1.2.0) is wrong: ",
)
KERNEL = "your kernel is wrong: "
REFUSED = "Triton refuses the kernel: "
ANY = "-2147483648..2147483647"
GATHER = "x=fp32:64x32 ids=i32:8:64 y=fp32:8x8 stride=32 C=24 N=8 D=8 --grid 1 --expect y=x[ids][:,24:32]"
RETURN = "flag=i32:1:zeros x=fp32:100 y=fp32:100 n=100 N=64 --grid 2 --expect y=2*x"
SOFTMAX = "x=fp32:16x100 y=fp32:16x100 columns=100 BLOCK=128 --grid 16 --expect y=x.softmax(-1)"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("not_true x=fp32:64 y=i32:64 N=64 --grid 1 --expect y=(x<0).int()", COMPILERS),
        ("is_true x=fp32:64 y=i32:64 N=64 --grid 1", COMPILERS),
        ("not_it x=fp32:64 y=i32:64 N=64 --grid 1 --expect y=(x<0).int()", "right: "),
        (f"shifted x=i32:64:{ANY} y=i32:64 N=64 --grid 1", COMPILERS),
        ("shifted x=i32:64:0..2147483647 y=i32:64 N=64 --grid 1 --expect y=x>>1", "right: "),
        ("quotient x=i32:64:16777216..2147483647 y=i32:64 n=3 N=64 --grid 1", COMPILERS),
        ("quotient x=i32:64:16777216 y=i32:64 n=3 N=64 --grid 1 --expect y=x//3", "right: "),
        (f"gathered {GATHER}", FRONT_END),
        (f"gathered_straight {GATHER}", "right: "),
        ("every_third x=fp32:100 y=fp32:300:zeros n=100 N=64 --grid 2", FRONT_END),
        ("exchanged x=i32:1:zeros y=i32:1 --grid 1", COMPILERS),
        (f"high_half x=i32:64:{ANY} y=i32:64 N=64 --grid 1", FRONT_END),
        (f"softmax {SOFTMAX} OTHER=0.0", KERNEL),
        (f"softmax {SOFTMAX} OTHER=-inf", "right: "),
        ("unmasked x=fp32:100 y=fp32:100 n=100 N=64 --grid 2", KERNEL),
        ("accumulated x=fp32:256 y=fp32:1:zeros N=64 --grid 4", KERNEL),
        (
            "product a=bf16:70x70 b=bf16:70x70 c=bf16:70x70 M=70 N=70 K=70 BM=32 BN=32 BK=32 --grid 3,3 --expect c=a@b",
            "right: ",
        ),
        ("narrow_sum x=fp16:8x1000 y=fp16:8 columns=1000 BLOCK=1024 --grid 8", "every level that ran computes the same"),
        ("online x=fp32:8x512 y=fp32:8 n_tiles=4 BLOCK=128 --grid 8 --expect y=x.logsumexp(-1)", "right: "),
        ("bare_softmax x=fp32:8x100 y=fp32:8x100 columns=100 BLOCK=128 --grid 8 --expect y=x.softmax(-1)", KERNEL),
        ("weighted x=fp16:64x64 v=fp16:64x32 y=fp16:64x32 N=64 D=32 --grid 64 --expect y=x.softmax(-1)@v", "right: "),
        ("squares x=fp16:64:200..400 y=fp16:64 N=64 NARROW=False --grid 1 --expect y=x*x", "right: "),
        ("squares x=fp16:64:200..400 y=fp16:64 N=64 NARROW=True --grid 1 --expect y=x*x/16", KERNEL),
        (
            "normalised x=fp32:64x768:50..60 y=fp32:64x768 rows=64 columns=768 ROWS=4 COLUMNS=1024 --grid 16"
            " --expect y=F.layer_norm(x,(768,))",
            "right: ",
        ),
        ("joined x=fp32:100x8 w=fp32:100x16 y=fp32:100x24 n=2400 N=512 --grid 5", FRONT_END),
        (f"nested_return {RETURN}", FRONT_END),
        ("described x=fp32:48x96 M=48 N=96 BM=16 BN=32 --grid 3,3 --expect x=x.abs()", "right: "),
        ("described x=fp32:50x100 M=50 N=100 BM=16 BN=32 --grid 4,4 --expect x=x.abs()", FRONT_END),
        (f"two_returns {RETURN}", "right: every level that ran is as expected"),
        (
            "product_in_half a=fp16:64x64 b=fp16:64x64 c=fp16:64x64 N=64 --grid 1 --toolchain 1.2.0 --expect c=a@b",
            "right: ",
        ),
        ("divided x=i32:64:100 by=i32:64:0..3 y=i32:64 z=i32:64 N=64 --grid 1", "every level that ran computes the same"),
        ("summed x=fp32:64 y=fp32:1 N=64 --grid 1 --expect y=x.sum()", "right: "),
        ("to_bytes x=fp32:64 y=i8:64 n=64 scale=100.0 CLAMPS=False N=64 --grid 1", KERNEL),
        ("to_bytes x=fp32:64 y=i8:64 n=64 scale=100.0 CLAMPS=True N=64 --grid 1", "every level that ran computes the same"),
        (
            "to_bytes x=fp32:64:0..1 y=i8:64 n=64 scale=100.0 CLAMPS=False N=64 --grid 1 --expect y=(x*100).trunc()",
            "right: ",
        ),
    ],
    ids=lambda value: value.split()[0] if "=" in value else None,
)
def test_run_says_whose_fault_it_is(call, said, capsys):
    status = main(["run", *f"{FILE}::{call}".split()])
    printed = capsys.readouterr().out.splitlines()
    found = [line for line in printed if " is wrong: " in line and not line.startswith((" ", "│"))]
    places = (re.match(r"\S*culprit_kernels.py:\d+:\d+: ", line) for line in found)
    culprits = [line.removeprefix(place[0]) for line, place in zip(found, places, strict=True) if place]
    assert [line for line in (*culprits, *printed) if line.startswith(said)], printed
    assert len(culprits) == len(found), found
    assert not any("no third opinion" in line for line in printed)
    others = [line for line in culprits if not line.startswith((said, "the compiler of CANN 8.5 (1.0.0) is wrong: "))]
    assert not others
    assert status == bool(culprits)


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        ("exchanged x=i32:1:zeros y=i32:1 --grid 1", 19),
        ("not_true x=fp32:64 y=i32:64 N=64 --grid 1", 21),
        (f"shifted x=i32:64:{ANY} y=i32:64 N=64 --grid 1", 22),
        ("quotient x=i32:64:16777216..2147483647 y=i32:64 n=3 N=64 --grid 1", 23),
        (f"gathered {GATHER}", 27),
        ("joined x=fp32:100x8 w=fp32:100x16 y=fp32:100x24 n=2400 N=512 --grid 5", 10),
        (f"nested_return {RETURN}", 35),
        ("described x=fp32:50x100 M=50 N=100 BM=16 BN=32 --grid 4,4", 37),
        ("below x=fp32:64 z=fp32:64 y=i32:64 N=64 --grid 1", 36),
        ("summed_bytes x=i8:64:50..100 y=i32:1 N=64 --grid 1 --linalg-only --expect y=x.sum().view(1)", 24),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else None,
)
def test_a_verdict_names_the_fault_and_the_way_round(call, fault, capsys):
    newest = "" if "--linalg-only" in call else " --toolchain 1.2.0"
    main(["run", *f"{FILE}::{call}{newest}".split()])
    assert f"  perhaps compiler fault {fault}: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("late_blocks x=fp32:50x100 y=fp32:50x100 M=50 N=100 BM=16 BN=32 --grid 4 --expect y=2*x", "not run: triton-ascend"),
        ("last_product a=fp16:32x64 b=fp16:64x32 c=fp16:32x32 K=64 B=32 --grid 1 --expect c=a@b", "1.0.0 cannot compile"),
    ],
)
def test_a_wrong_kernel_is_named_also_where_a_compiler_refuses_it(call, said, capsys):
    assert main(["run", *f"{FILE}::{call}".split()]) == 1
    printed = capsys.readouterr().out
    assert said in printed
    assert re.search(rf"^\S*culprit_kernels.py:\d+:1: {KERNEL}", printed, re.MULTILINE), printed


@pytest.mark.parametrize(
    ("call", "text", "said"),
    [
        (
            "unlike_products a=fp16:32x64 b=fp16:32x64 y=fp32:32x32 N=32 K=64",
            "tl.dot(b_a, b_b))",
            f"{REFUSED}AssertionError('First input shape ([constexpr[32], constexpr[64]])",
        ),
        ("calls_a_wrong_helper x=fp32:32 y=fp32:32 N=32", "x + tl.arange(0, N + N)", f"{REFUSED}ValueError("),
        ("for_cuda y=i32:1", "tl.extra.cuda", f"{REFUSED}triton-ascend 3.2.0 has no triton.language.extra.cuda"),
        (
            "with_assembly x=fp32:64 y=fp32:64 N=64",
            "tl.inline_asm_elementwise(",
            "tl.inline_asm_elementwise has assembly of another chip: Ascend's assembler knows none of it",
        ),
    ],
    ids=lambda value: value.split()[0] if "=" in value else None,
)
def test_a_kernel_that_is_refused_is_named_with_its_line(call, text, said, capsys):
    assert main(["run", *f"{FILE}::{call} --grid 1".split()]) == 2
    printed = capsys.readouterr().out.splitlines()
    (line,) = [number for number, each in enumerate(FILE.read_text().splitlines(), 1) if text in each]
    (found,) = [each for each in printed if re.match(rf"\S*culprit_kernels.py:{line}:\d+: ", each)]
    assert found.partition(": ")[2].startswith(said)
    assert [each for each in printed if each.startswith("not run: ")] == [f"not run: {call.split()[0]}"]


@pytest.mark.parametrize(
    ("dtype", "meant", "moved", "said"),
    [
        (torch.int8, [1, 3, -56], [1, 3, 127], "1 of 3 elements of q .* q\\[2\\] may be -56, or 127"),
        (torch.int32, [7, 1693427200], [7, 2147483647], "1 of 2 elements of q "),
        (torch.int8, [126, 125, -127], [127, 127, -128], ""),  # as rounding moves them
        (torch.int16, [32640], [32767], ""),
        (torch.float32, [-56.0], [127.0], ""),
    ],
)
def test_an_integer_is_undefined_where_its_float_was_too_large_and_not_where_it_was_rounded(dtype, meant, moved, said):
    found = undefined("q", torch.tensor(meant, dtype=dtype), lambda: torch.tensor(moved, dtype=dtype))
    assert re.match(said, found) if said else found == ""


def test_a_kernel_whose_ttir_does_not_end_either_is_named_with_its_loop(capsys):
    assert main(["all", f"{FILE}::root", "x=i32:4:10000", "y=i32:4", "--grid", "4", "--limit", "1"]) == 1
    said = capsys.readouterr().out
    assert re.search(rf"{FILE.name}:\d+:17: {KERNEL}.* does not end, .*; its TTIR does not end either", said), said
    assert said.rstrip().endswith("time: not run: a loop does not end")


def test_pointers_to_what_is_no_argument_are_not_executed():
    """They are no addresses out of bounds: what they point to is not known."""
    x, y = torch.ones(100), torch.zeros(1, 128)
    table, lengths = torch.tensor([x.data_ptr()]), torch.tensor([100], dtype=torch.int32)
    with emulate("Ascend910B4", meaning="only"), pytest.raises(UnsupportedError, match="points into no argument"):
        add_to_each[(1,)](table, lengths, y, 128)


def test_a_narrow_index_that_counts_as_signed_is_named_so(capsys):
    call = "looked_up x=u8:64:200..256 table=fp32:256 y=fp32:64 N=64 --grid 1 --linalg-only"
    assert main(["run", *f"{FILE}::{call}".split()]) == 1
    printed = capsys.readouterr().out
    assert f"{KERNEL}kernel looked_up, program (0, 0, 0): read at byte " in printed
    assert (
        "; an index of 8 or 16 bits counts as signed in Triton 3.2, of unsigned integers too: `index.to(tl.int32)`; its"
        in printed
    )
    assert "compiler fault 10" not in printed


def test_what_execution_does_not_know_is_no_fault_of_a_compiler(capsys):
    call = "products_of_a_group a=fp16:4x32x32 b=fp16:4x32x32 c=fp32:4x32x32 G=4 M=32 --grid 1 --expect c=a@b"
    assert main(["run", *f"{FILE}::{call} --toolchain 1.0.0".split()]) == 2
    printed = capsys.readouterr().out
    assert "not run: execution does not know this: fixpipe from 2 into 2 axes" in printed
    assert "is wrong" not in printed


def test_a_launch_takes_options_of_triton_ascend(capsys):
    call = f"{FILE}::doubled x=fp32:100 y=fp32:100 n=100 N=64 --grid 2 --linalg-only --expect y=2*x"
    assert main(["run", *call.split(), "multibuffer=False", "num_warps=4"]) == 0
    assert main(["run", *call.split(), "num_warp=4"]) == 2
    assert "kernel doubled has no argument num_warp; it has x, y, n, N" in capsys.readouterr().err


def test_a_grid_that_no_chip_launches_is_named_so(capsys):
    call = f"{FILE}::doubled x=fp32:70000 y=fp32:70000 n=70000 N=1 --grid 70000 --linalg-only"
    assert main(["run", *call.split()]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "--grid is '70000': 70,000 programs, and a chip launches at most 65,535: let each program do" in said


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("options", [{}, {"toolchain": "1.2.0", "final": True}], ids=["linalg", "final"])
def test_a_division_by_zero_ends_no_process(options, dtype):
    x = torch.full((64,), torch.iinfo(dtype).min, dtype=dtype)
    by = torch.arange(64, dtype=dtype) - 1
    y, z = torch.empty(2, 64, dtype=dtype)
    with emulate("Ascend910B4", **options):
        divided[(1,)](x, by, y, z, N=64)
    assert torch.equal(z[2:], x[2:] - by[2:] * torch.div(x[2:], by[2:], rounding_mode="trunc"))
    if not (options and dtype == torch.int32):  # compiler fault 23
        assert torch.equal(y[2:], torch.div(x[2:], by[2:], rounding_mode="trunc"))


def test_long_sums_of_products_in_two_orders_are_no_difference():
    torch.manual_seed(4)
    t, tile, d = 1024, 32, 128
    k, v, h = torch.randn(t, d), torch.randn(t, d), torch.empty(t // tile, d, d)
    with emulate("Ascend910B4", meaning="only"):
        states[(1,)](k, v, h, t, BT=tile, D=d)
    meant = h.clone()
    with emulate("Ascend910B4", meaning="other"):
        states[(1,)](k, v, h, t, BT=tile, D=d)
    off = (meant - h).abs()
    with emulate("Ascend910B4"):
        states[(1,)](k, v, h, t, BT=tile, D=d)
    assert (meant - h).abs().median() <= 1.5 * off.median()
    assert not unlike("h", h, meant, lambda: meant + off)


def test_a_short_product_is_moved_too():
    a, b = torch.randn(2, 1, 64, 64, generator=torch.Generator().manual_seed(1))
    meant, other = torch.empty(2, 1, 64, 64)
    for level, c in (("only", meant), ("other", other)):
        with emulate("Ascend910B4", meaning=level):
            products_of_a_group[(1,)](a, b, c, G=1, M=64)
    assert (meant != other).double().mean() > 0.5


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_an_element_that_nobody_writes_is_named_so(dtype, capsys):
    call = f"{FILE}::doubled x={dtype}:100 y={dtype}:100 n=100 N=64 --grid 1 --linalg-only --expect y=2*x"
    assert main(["run", *call.split()]) == 1
    assert "36 of 100 elements of y are wrong: y[64] was not written, or read before that, must be " in (
        " ".join(capsys.readouterr().out.split())
    )


@pytest.mark.parametrize(("dtype", "expected"), [("fp32", "2*x+0*y"), ("i32", "2*x")])
def test_an_element_that_keeps_its_value_is_named_so(dtype, expected, capsys):
    call = f"{FILE}::doubled x={dtype}:100 y={dtype}:100 n=100 N=64 --grid 1 --linalg-only --expect y={expected}"
    assert main(["run", *call.split()]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(r"\d+ of 100 elements of y are wrong: y\[\d+\] is \S+, as before the launch, must be ", printed), (
        printed
    )


def test_a_kernel_that_only_rounds_too_much_is_told_so(capsys):
    softmax = "bare_softmax x=fp32:8x100 y=fp32:8x100 columns=100 BLOCK=128 --grid 8 --linalg-only --expect y=x.softmax(-1)"
    assert main(["run", *f"{FILE}::{softmax}".split()]) == 1
    printed = capsys.readouterr().out
    assert f"{KERNEL}with numbers above zero, up to 200: " in printed
    assert "\n  in fp64 it is as expected: " in printed
    assert main(["run", *f"{FILE}::softmax {SOFTMAX} OTHER=0.0 --linalg-only".split()]) == 1
    assert "in fp64" not in capsys.readouterr().out


def test_a_sum_in_fp16_that_is_far_off_in_the_order_of_a_chip_is_not_right(capsys):
    call = f"{FILE}::narrow_sum x=fp16:8x4000:0..16 y=fp16:8 columns=4000 BLOCK=4096 --grid 8 --linalg-only"
    assert main(["run", *call.split(), "--expect", "y=x.sum(1)"]) == 1
    assert "\nrounding: " in capsys.readouterr().out


@triton.jit
def integers(x, y, wide, N: tl.constexpr):
    o = tl.arange(0, N)
    b_x = tl.load(x + o)
    b_u = b_x.to(tl.uint8, bitcast=True)
    tl.store(y + o, b_x + b_x)
    tl.store(y + N + o, b_x * b_x)
    tl.store(y + 2 * N + o, b_x // 7)
    tl.store(y + 3 * N + o, b_x % 7)
    tl.store(y + 4 * N + o, b_x >> 1)
    tl.store(y + 5 * N + o, (b_u >> 1).to(tl.int8, bitcast=True))
    tl.store(y + 6 * N + o, tl.minimum(b_u, tl.full([N], 100, tl.uint8)).to(tl.int8, bitcast=True))
    tl.store(wide + o, b_u.to(tl.int64))
    tl.store(wide + N + o, b_x.to(tl.int64))
    tl.store(wide + 2 * N + o, (b_u < 100).to(tl.int64))
    tl.store(wide + 3 * N + o, (b_u // 7).to(tl.int64))


def test_integers_wrap_and_have_the_sign_that_the_kernel_says():
    x = torch.arange(-128, 128).to(torch.int8)
    y, wide, u = torch.empty(7, 256, dtype=torch.int8), torch.empty(4, 256, dtype=torch.int64), x.long() & 255
    with emulate("Ascend910B4", meaning="only"):
        integers[(1,)](x, y, wide, N=256)
    towards_zero = torch.div(x.long(), 7, rounding_mode="trunc")
    of_bits = [
        x.long() * 2,
        x.long() ** 2,
        towards_zero,
        x.long() - 7 * towards_zero,
        x.long() >> 1,
        u >> 1,
        u.clamp(max=100),
    ]
    assert torch.equal(y, torch.stack(of_bits).to(torch.int8))
    assert torch.equal(wide, torch.stack([u, x.long(), (u < 100).long(), u // 7]))


@triton.jit
def shifts(x, amounts, y, UNSIGNED: tl.constexpr, N: tl.constexpr):
    o = tl.arange(0, N)
    b_x, b_n = tl.load(x + o).to(UNSIGNED, bitcast=True), tl.load(amounts + o)
    b_i = tl.load(x + o)
    tl.store(y + o, (b_x >> 3).to(b_i.dtype, bitcast=True))
    tl.store(y + N + o, b_i >> 3)
    tl.store(y + 2 * N + o, b_i << 5)
    tl.store(y + 3 * N + o, (b_x >> b_n.to(UNSIGNED, bitcast=True)).to(b_i.dtype, bitcast=True))
    tl.store(y + 4 * N + o, b_i >> b_n)


@pytest.mark.parametrize(
    ("dtype", "unsigned"), [(torch.int16, tl.uint16), (torch.int32, tl.uint32), (torch.int64, tl.uint64)], ids=str
)
def test_shifts_keep_or_copy_the_sign(dtype, unsigned):
    limits = torch.iinfo(dtype)
    x = torch.randint(limits.min, limits.max, (64,), dtype=dtype)
    amounts = torch.randint(0, limits.bits, (64,), dtype=dtype)
    y = torch.empty(5, 64, dtype=dtype)
    with emulate("Ascend910B4", meaning="only"):
        shifts[(1,)](x, amounts, y, UNSIGNED=unsigned, N=64)
    numbers, moved = x.tolist(), amounts.tolist()
    without_sign = [number % 2**limits.bits for number in numbers]
    of_bits = [
        [number >> 3 for number in without_sign],
        [number >> 3 for number in numbers],
        [number << 5 for number in numbers],
        [number >> n for number, n in zip(without_sign, moved, strict=True)],
        [number >> n for number, n in zip(numbers, moved, strict=True)],
    ]
    half = 2 ** (limits.bits - 1)
    assert y.tolist() == [[(number + half) % (2 * half) - half for number in row] for row in of_bits]


@triton.jit
def floats(x, y, counts, N: tl.constexpr):
    o = tl.arange(0, N)
    b_x = tl.load(x + o)
    tl.store(y + o, b_x * b_x + b_x)
    tl.store(y + N + o, tl.maximum(b_x, 0.0))
    tl.store(y + 2 * N + o, tl.maximum(b_x, 0.0, propagate_nan=tl.PropagateNan.ALL))
    tl.store(y + 3 * N + o, tl.cumsum(b_x.to(tl.float32), 0).to(tl.bfloat16))
    tl.store(counts, tl.sum(b_x > 0).to(tl.int32))
    tl.store(counts + 1, tl.argmax(tl.where(b_x == b_x, b_x, -9.0), 0))
    tl.store(counts + 2, tl.sum((b_x > 0).to(tl.int32)))


def test_floats_are_rounded_after_every_operation_and_nan_is_as_triton_says():
    x = torch.randn(64).bfloat16()
    x[3] = torch.nan
    y, counts = torch.empty(4, 64, dtype=torch.bfloat16), torch.empty(3, dtype=torch.int32)
    with emulate("Ascend910B4", meaning="only"):
        floats[(1,)](x, y, counts, N=64)
    wanted = torch.stack([x * x + x, x.nan_to_num(0.0).relu(), x.relu(), x.float().cumsum(0).bfloat16()])
    assert torch.equal(y.nan_to_num(7.0), wanted.nan_to_num(7.0))
    positive = int((x > 0).sum())
    assert counts.tolist() == [positive % 2, int(x.nan_to_num(-9.0).argmax()), positive]


# A command in a process of its own: PyTorch keeps the name of a device to the end of its process.
FAILING = """
import sys
from unittest import mock
from npu_offline.cli import main
with mock.patch(sys.argv[1], lambda *arguments, **options: {}["mistake"]):
    sys.exit(main(sys.argv[2:]))
"""
DOUBLED = f"{FILE}::doubled x=fp32:64 y=fp32:64 n=64 N=64 --grid 1"


@pytest.mark.parametrize(
    ("failing", "status", "command"),
    [
        ("execute.meaning.programs.Meaning.execute", 0, f"run {DOUBLED} --expect y=x*2 --linalg-only"),
        ("execute.backend._emulated_object", 2, f"run {DOUBLED} --expect y=x*2 --linalg-only"),
        ("execute.launcher.storage_of", 2, f"check {DOUBLED} --soc Ascend910B4 --toolchain 1.0.0 --fresh"),
        ("execute.launcher.storage_of", 2, "run --linalg-only -- python {program}"),
        ("execute.launcher.storage_of", 2, "model --toolchain 1.0.0 --output {folder} -- python {program}"),
        ("lint.engine.checked", 2, f"lint {DOUBLED} --jobs 1"),
        ("timing.model._simulated", 2, f"time {DOUBLED}"),
    ],
)
def test_a_mistake_of_ours_is_not_the_kernels(failing, status, command, tmp_path, monkeypatch):
    program = tmp_path / "program.py"
    program.write_text(f"""
import sys, torch
sys.path.insert(0, {str(FILE.parent)!r})
from culprit_kernels import doubled
doubled[(1,)](torch.ones(64, device="npu"), torch.empty(64, device="npu"), 64, N=64)
""")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    done = forks.run("-c", FAILING, f"npu_offline.{failing}", *command.format(program=program, folder=tmp_path).split())
    said = " ".join((done.stdout + done.stderr).replace("│", " ").split())
    assert done.returncode == status, said
    assert "npu-offline itself fails, please report it: KeyError: 'mistake' (<string>:" in said
    assert "is wrong" not in said


def test_a_kernel_is_judged_after_programs_ran_for_an_npu(tmp_path):
    (tmp_path / "program.py").write_text("")
    program = f"main(['run', '--', 'python', {str(tmp_path / 'program.py')!r}])"  # names PyTorch's private device
    kernel = f"main({f'run {DOUBLED} --expect y=x*2 --linalg-only'.split()})"
    done = forks.run("-c", f"import sys; from npu_offline.cli import main; {program}; sys.exit({kernel})")
    assert done.returncode == 0
    assert "right: every level that ran is as expected" in done.stdout


def test_a_race_is_named_before_the_values_that_it_makes_wrong(capsys):
    call = f"{FILE}::raced x=fp32:64 y=fp32:64 N=64 --grid 4 --expect y=x*2 --linalg-only"
    assert main(["run", *call.split()]) == 1
    race, values = [line for line in capsys.readouterr().out.splitlines() if KERNEL in line]
    assert "race" in race
    assert "elements of y are wrong" in values


def test_the_element_that_is_shown_is_off_by_more_than_a_rounding(capsys):
    call = f"{FILE}::doubled x=fp16:256 y=fp16:256 n=256 N=64 --grid 4 --linalg-only"
    expected = "y=torch.where(torch.arange(256)==200,9,x*2+.01*(torch.arange(256)==7))"
    assert main(["run", *call.split(), "--expect", expected]) == 1
    assert "2 of 256 elements of y are wrong: y[200] is " in capsys.readouterr().out


@triton.jit
def later(a, i, b, j):
    return tl.where(b > a, b, a), tl.where(b > a, j, i)


@triton.jit
def with_places(x, y, places, N: tl.constexpr):
    row, o = tl.program_id(0), tl.arange(0, N)
    b_x = tl.load(x + row * N + o)
    tl.store(places + 2 * row, tl.argmax(b_x, 0))
    _, last = tl.reduce((N - o, o), 0, later)
    tl.store(places + 2 * row + 1, last + tl.reduce((o, b_x), 0, later)[0])
    largest, place = tl.associative_scan((b_x, o), 0, later)
    tl.store(y + row * N + o, largest + place)


def test_programs_reduce_and_scan_their_own_numbers_beside_those_they_share():
    x = torch.randn(5, 64)
    y, places = torch.empty_like(x), torch.empty(5, 2, dtype=torch.int32)
    with emulate("Ascend910B4", meaning="only"):
        with_places[(5,)](x, y, places, N=64)
    largest, place = x.cummax(1)
    assert torch.equal(y, largest + place)
    assert places.tolist() == [[int(at), 63] for at in x.argmax(1)]


@triton.jit
def parting(x, y, z, n, N: tl.constexpr):
    i = tl.program_id(0)
    if i == 2:
        return
    o = tl.arange(0, N)
    b_x = tl.load(x + o)
    for _ in range(i):
        b_x += 1
    k = 0
    while k < i:
        b_x *= 2
        k += 2
    if i % 2 == 0:
        b_x -= 100
    tl.store(y + i * N + o, b_x)
    tl.atomic_add(z + i % 2, i)
    tl.atomic_max(z + 2 + o % 2, o + i)


def test_programs_part_ways_in_loops_branches_and_returns():
    x, y, z = torch.randn(16), torch.full((6, 16), 7.0), torch.zeros(4, dtype=torch.int32)
    with emulate("Ascend910B4", meaning="only"):
        parting[(6,)](x, y, z, 6, N=16)
    for i in range(6):
        wanted = (x + i if i < 5 else ((((x + 1) + 1) + 1) + 1) + 1) * 2 ** ((i + 1) // 2) - (100 if i % 2 == 0 else 0)
        torch.testing.assert_close(y[i], torch.full((16,), 7.0) if i == 2 else wanted)
    assert z.tolist() == [4, 1 + 3 + 5, 14 + 5, 15 + 5]


def test_what_is_out_of_bounds_or_races_as_triton_defines_it_is_an_error():
    from culprit_kernels import accumulated, doubled, unmasked

    x, y = torch.randn(256), torch.zeros(256)
    with emulate("Ascend910B4", meaning="races"):
        doubled[(4,)](x, y, 256, N=64)
        with pytest.raises(RaceError):
            accumulated[(4,)](x, y, N=64)
    with (
        emulate("Ascend910B4", meaning="only"),
        pytest.raises(OutOfBoundsError, match=r"program \(1, 0, 0\): read at byte 400"),
    ):
        unmasked[(2,)](x[:100].clone(), y, 100, N=64)


def test_launches_from_linalg_ir_are_compared_one_by_one():
    from culprit_kernels import gathered, gathered_straight

    x, ids = torch.randn(64, 32), torch.arange(8, dtype=torch.int32)
    with emulate("Ascend910B4", meaning="beside", keep_going=True) as emulation:
        for kernel in (gathered, gathered_straight):
            kernel[(1,)](x, ids, torch.empty(8, 8), 32, C=24, N=8, D=8)
    assert [[note.kind for note in launch.notes] for launch in emulation.launches] == [["meaning"], []]


def test_rounding_is_no_difference_and_anything_else_is():
    meant = torch.randn(1000)
    moved = meant.double() * (1 + 1e-6 * torch.randn(1000))
    assert not unlike("y", meant * (1 + 1e-6), meant, lambda: moved)
    assert "1 of 1000 elements of y differ: y[7] is " in unlike(
        "y", torch.where(torch.arange(1000) == 7, meant + 0.01, meant), meant, lambda: moved
    )
    assert unlike("y", torch.where(torch.arange(1000) == 7, torch.nan, meant), meant, lambda: moved)
    counts = torch.arange(1000)
    assert unlike("n", counts + (counts == 7), counts, lambda: counts)


def test_results_of_a_file_are_expected_and_verdicts_are_written_as_json(tmp_path, capsys):
    numpy = pytest.importorskip("numpy")
    x = torch.randn(16, 100)
    for name, value in (("x", x), ("right", x.softmax(-1)), ("wrong", x.softmax(0))):
        numpy.save(tmp_path / f"{name}.npy", value.numpy())
    call = f"{FILE}::softmax x={tmp_path}/x.npy y=fp32:16x100 columns=100 BLOCK=128 OTHER=-inf --grid 16 --linalg-only"
    for name, culprit in (("right", ""), ("wrong", "your kernel")):
        out = tmp_path / "out.json"
        status = main(["run", *call.split(), "--expect", f"y={tmp_path}/{name}.npy", "--json", str(out)])
        (written,) = json.loads(out.read_text())["calls"]
        assert [verdict["culprit"] for verdict in written["verdicts"]] == [culprit]
        assert [level["ok"] for level in written["levels"]] == [not culprit] * 2
        assert status == bool(culprit)


def test_all_commands_run_with_one_start_and_one_line_at_the_end(capsys, tmp_path):
    call = f"{FILE}::doubled x=fp32:16384 y=fp32:16384 n=16384 N=8192 --grid 2"
    assert main(["all", *call.split(), "--expect", "y=2*x", "--json", str(tmp_path / "all.json")]) == 0
    written = json.loads((tmp_path / "all.json").read_text())
    assert list(written) == ["run", "check", "lint", "time"]
    assert written["run"]["calls"][0]["verdicts"][0]["text"] == "right: every level that ran is as expected"
    assert written["time"][0]["kernel"] == "doubled"
    assert capsys.readouterr().out.endswith("\nrun: right; check: nothing wrong; lint: nothing wrong; time: nothing wrong\n")
    assert main(["all", *call.split(), "--expect", "y=3*x"]) == 1
    assert "run: your kernel is wrong; check: nothing wrong; " in capsys.readouterr().out


def test_a_tile_too_large_is_the_fault_of_the_kernel_and_the_largest_that_fits_is_named(capsys, monkeypatch):
    monkeypatch.chdir(FILE.parent)
    place = f"culprit_kernels.py:{doubled.fn.__code__.co_firstlineno + 1}:1: "
    call = [f"{FILE}::doubled", "x=fp32:99999", "y=fp32:99999", "n=99999", "N=131072", "--grid", "1"]
    over = "ub overflow, requires 4194304 bits while 1572864 bits available; the largest N that does is "
    assert main(["run", *call, "--toolchain", "1.2.0"]) == 1
    said = f"{place}{KERNEL}it does not fit with about CANN 9.1 (1.2.0): {over}32768"
    assert said in capsys.readouterr().out.splitlines()
    assert main(["check", *call, "--toolchain", "1.2.0", "--soc", "Ascend910B4"]) == 1
    said = f"{place}doubled N=131072, *fp32 does not fit Ascend910B4 (1.2.0): {over}32768"
    assert said in capsys.readouterr().out.splitlines()
