"""Operations of Triton that Linalg IR leaves to the compiler's library, hints, printing: at both levels, against PyTorch."""

import pytest
from npu_offline.cli import main

KERNELS = """
import triton
import triton.language as tl
from triton.language.extra.ascend import libdevice


@triton.jit
def hints(x, y, n, BLOCK: tl.constexpr):
    tl.assume(n > 0)
    o = tl.arange(0, BLOCK)
    tl.store(y + o, tl.load(x + o, mask=o < n) * 2, mask=o < n)
    tl.debug_barrier()


@triton.jit
def printing(x, y, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    b = tl.load(x + o)
    tl.device_print("size", n)
    tl.device_print("tile", b)
    tl.store(y + o, b * 2)


@triton.jit
def dropout(x, y, seed, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(y + o, tl.where(tl.rand(seed, o) < 0.5, tl.load(x + o), 0.0))


@triton.jit
def scans(x, y, z, M: tl.constexpr, N: tl.constexpr):
    o = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    b = tl.load(x + o)
    tl.store(y + o, tl.cumsum(b, 0) + 2 * tl.cumsum(b, 0, reverse=True))
    tl.store(z + o, tl.cumprod(b, 1, reverse=True))


@triton.jit
def integers(x, y, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(y + o, tl.cumsum(tl.load(x + o), 0))


@triton.jit
def sort(x, y, M: tl.constexpr, N: tl.constexpr, DOWN: tl.constexpr):
    o = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(y + o, tl.sort(tl.load(x + o), 1, DOWN))


@triton.jit
def flip(x, y, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(y + o, tl.flip(tl.load(x + o), 0))


@triton.jit
def flipped_sums(x, y, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(y + o, tl.flip(tl.cumsum(tl.load(x + o), 0), 0))


@triton.jit
def casts(x, y, z, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    b = tl.where(o == 3, float("nan"), tl.load(x + o))
    tl.store(y + o, b.to(tl.int8))
    tl.store(z + o, b.to(tl.int32))


@triton.jit
def turned(x, y):
    b = tl.reshape(tl.load(x + tl.arange(0, 256)), (4, 16, 4))
    tl.store(y + tl.arange(0, 256), tl.ravel(tl.permute(b, (2, 0, 1))))


@triton.jit
def read_again(x, y, z, u, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    b = tl.load(x + o)
    tl.atomic_or(y + o, b)
    tl.store(z + o, b + 1)
    tl.atomic_xor(u + o, b)


@triton.jit
def extremes(x, y, z, u, BLOCK: tl.constexpr):
    b = tl.load(x + tl.arange(0, BLOCK))
    tl.atomic_max(y, tl.max(b, 0))
    tl.atomic_min(z, tl.min(b, 0))
    tl.atomic_or(u, tl.max(b, 0))


@triton.jit
def assembly(x, y, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    b = tl.load(x + o)
    tl.store(y + o, tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [b], dtype=tl.float32, is_pure=True, pack=1))


@triton.jit
def gather(x, i, y, M: tl.constexpr, N: tl.constexpr):
    o = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(y + o, tl.gather(tl.load(x + o), tl.load(i + o), 1))


@triton.jit
def histogram(x, y, BLOCK: tl.constexpr, BINS: tl.constexpr):
    tl.store(y + tl.arange(0, BINS), tl.histogram(tl.load(x + tl.arange(0, BLOCK)), BINS))


@triton.jit
def many_axes(x, y):
    o = tl.reshape(tl.arange(0, 128), (2, 2, 2, 2, 2, 2, 2))
    b = tl.reshape(tl.load(x + tl.arange(0, 128)), (2, 2, 2, 2, 2, 2, 2))
    b = b + tl.flip(o, 6).to(tl.float32)
    tl.store(y + tl.arange(0, 64), tl.reshape(tl.sum(b, 3), (64,)))


@triton.jit
def power(x, y, e, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(y + o, libdevice.pow(tl.load(x + o), tl.cast(e, tl.float32)))


@triton.jit
def combine(m, s, n, m2, s2, n2):
    return m + m2, s + s2, n + n2


@triton.jit
def three(x, y, BLOCK: tl.constexpr):
    b = tl.load(x + tl.arange(0, BLOCK))
    m, s, n = tl.reduce((b, b * b, b * 0 + 1), 0, combine)
    tl.store(y, m + s + n)
"""
LINE = "x=fp32:64 y=fp32:64"
TABLE = "x=fp32:4x32 y=fp32:4x32"
RIGHT = {
    "hints": (f"{LINE} n=60 BLOCK=64", ["y=torch.cat((2 * x[:60], y[60:]))"]),
    "printing": (f"{LINE} n=3 BLOCK=64", ["y=2 * x"]),
    "scans": (
        f"{TABLE} z=fp32:4x32 M=4 N=32",
        ["y=x.cumsum(0) + 2 * x.flip(0).cumsum(0).flip(0)", "z=x.flip(1).cumprod(1).flip(1)"],
    ),
    "integers": ("x=i32:64:100 y=i32:64 BLOCK=64", ["y=x.cumsum(0)"]),
    "sort": (f"{TABLE} M=4 N=32 DOWN=True", ["y=x.sort(1, descending=True)[0]"]),
    "flip": (f"{LINE} BLOCK=64", ["y=x.flip(0)"]),
    "flipped_sums": (f"{LINE} BLOCK=64", ["y=x.cumsum(0).flip(0)"]),
    "casts": (
        "x=fp32:64:-9..9 y=i8:64 z=i32:64 BLOCK=64",
        [f"{each}=torch.where(torch.arange(64) == 3, 0, x.trunc().long())" for each in "yz"],
    ),
    "turned": ("x=fp32:256 y=fp32:256", ["y=x.view(4, 16, 4).permute(2, 0, 1).flatten()"]),
    "read_again": ("x=i32:64:999 y=i32:64:zeros z=i32:64 u=i32:64:zeros BLOCK=64", ["y=x", "z=x+1", "u=x"]),
    "extremes": (
        "x=i32:64:5..999 y=i32:1:zeros z=i32:1:999..1000 u=i32:1:zeros BLOCK=64",
        ["y=x.max()[None]", "z=x.min()[None]", "u=x.max()[None]"],
    ),
    "gather": (f"{TABLE} i=i32:4x32:32 M=4 N=32", ["y=x.gather(1, i.long())"]),
    "many_axes": ("x=fp32:128 y=fp32:64", ["y=(x + (torch.arange(128) ^ 1)).view(8, 2, 8).sum(1).flatten()"]),
    "power": ("x=fp32:64:positive y=fp32:64 e=2.5 BLOCK=64", ["y=x**2.5"]),
    "histogram": ("x=i32:64:8 y=i32:8 BLOCK=64 BINS=8", ["y=x.bincount(minlength=8)"]),
}


@pytest.fixture
def run(tmp_path, capfd):
    path = tmp_path / "kernels.py"
    path.write_text(KERNELS)

    def run(kernel, given, *options):
        status = main(["run", f"{path}::{kernel}", *given.split(), "--grid", "1", *options])
        said = capfd.readouterr()
        return status, " ".join((said.out + said.err).replace("│", " ").split())

    return run


@pytest.mark.parametrize("kernel", RIGHT)
def test_operations_compute_what_pytorch_does(run, kernel):
    given, expected = RIGHT[kernel]
    levels = ["--toolchain", "1.0.0", "--toolchain", "1.2.0"]
    status, said = run(kernel, given, *levels, *(text for each in expected for text in ("--expect", each)))
    assert said.count("as expected") == 5, said  # TTIR, Linalg IR, two modules, and the verdict
    assert status == 0


def test_device_print_prints(run):
    _, said = run("printing", "x=fp32:64 y=fp32:64 n=3 BLOCK=64", "--linalg-only")
    assert "program (0, 0, 0) size: 3 program (0, 0, 0) tile: -1.12584 -1.15236" in said


def test_random_numbers_are_the_same_at_every_level_of_a_chip(run):
    """Of seed 7: numbers below a half, of Philox with signed products (compiler fault 13)."""
    expected = "y=x * torch.tensor([0, 1, 0, 0, 1, 0, 0, 1])"
    given = "x=fp32:8 y=fp32:8 seed=7 BLOCK=8"
    status, said = run("dropout", given, "--toolchain", "1.0.0", "--toolchain", "1.2.0", "--expect", expected)
    assert said.count("as expected") == 3, said
    assert "triton-ascend's front end is wrong: " in said
    assert "your kernel" not in said
    assert "compiler fault 13" in said
    assert status == 1


def test_a_crash_of_the_compiler_is_its_assertion_and_what_to_do(run):
    status, said = run("three", "x=fp32:64 y=fp32:1 BLOCK=64", "--linalg-only")
    assert "Only reduce or reduce with index are supported" in said
    assert "reduce several values one by one" in said
    assert "#1 0x" not in said
    assert status == 2


@pytest.mark.parametrize("level", ["--linalg-only", "--toolchain=1.2.0"])
def test_assembly_is_refused_by_name(run, level):
    status, said = run("assembly", f"{LINE} BLOCK=64", level)
    assert "tl.inline_asm_elementwise has assembly of another chip" in said
    assert status == 2
