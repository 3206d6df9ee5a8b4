"""Kernels of a user who knows nothing of this package, and commands on them."""

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


def run(capsys, *arguments):
    status = main([*arguments])
    said = capsys.readouterr()
    return status, " ".join((said.out + said.err).replace("│", " ").split())
