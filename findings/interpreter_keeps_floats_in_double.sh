#!/usr/bin/env bash
# Triton's interpreter computes with a kernel's float arguments in double precision; compiled, they are fp32. x.to(...) of one is an error.
#
# Versions: triton 3.9.0, torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11; the IR that Triton makes for a GPU is read, none is used.
# Input: a kernel's argument s = 1.0: (s + 1e-9 - s) * 1e9, and 1 / (s * 1e-30 * 1e-30) * 1e-30; s.to(tl.float32), s.dtype.
# Expected: fp32, as the IR for a GPU has it ("%s: f32", arith.addf of f32): 0 and inf.
# Seen on 2026-11-30, TRITON_INTERPRET=1:
#     (s + 1e-9 - s) * 1e9             1.0000001, in fp32 0
#     1 / (s * 1e-30 * 1e-30) * 1e-30  1.0e30, in fp32 inf
#     s.to(tl.float32), s.dtype        AttributeError: 'float' object has no attribute; compiled, both are right
#   An argument stays Python's float until it meets a tensor. Scales, eps, 1 - beta and loss factors that overflow, underflow or cancel in fp32 on
#   a device are exact in a test on a CPU. (ints are made tensors of int32 or int64.)
#   Constants were treated so once, and are no more (Triton's #5965).
# A way round: scalars in a tensor, loaded; or tl.full([], s, tl.float32).
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet triton==3.9.0 torch==2.13.0 numpy==2.4.6

cat >"$work/kernel.py" <<'PYTHON'
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def scalar_kernel(y, s):
    tl.store(y, (s + 1e-9 - s) * 1e9)
    tl.store(y + 1, 1 / (s * 1e-30 * 1e-30) * 1e-30)


@triton.jit
def cast_kernel(y, s):
    tl.store(y, s.to(tl.float32))


@triton.jit
def dtype_kernel(y, s):
    if s.dtype == tl.float32:
        tl.store(y, s)


if sys.argv[1] == "compiled":
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    target = GPUTarget("cuda", 80, 32)
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options({})
    for kernel in (scalar_kernel, cast_kernel, dtype_kernel):
        source = ASTSource(kernel, {"y": "*fp32", "s": "fp32"}, {})
        text = str(source.make_ir(target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context))
        print(f"{kernel.__name__}: s is f32: {'%s: f32' in text}, f64 occurs: {'f64' in text}")
        if "%s: f32" not in text or "f64" in text or "tt.store" not in text:
            raise SystemExit("changed")
else:
    y = torch.zeros(2)
    scalar_kernel[(1,)](y, 1.0)
    single = torch.tensor(1.0)  # what fp32 makes of it
    must = [((single + 1e-9 - single) * 1e9).item(), (1 / (single * 1e-30 * 1e-30) * 1e-30).item()]
    print("interpreted:", y.tolist(), "in fp32:", must)
    refused = []
    for kernel in (cast_kernel, dtype_kernel):
        try:
            kernel[(1,)](y, 1.0)
        except Exception as error:  # InterpreterError is no public name
            refused.append("'float' object has no attribute" in str(error))
            print(f"{kernel.__name__}: {error}")
    if abs(y[0] - 1) > 1e-6 or not 0.9e30 < y[1] < 1.1e30 or must != [0.0, float("inf")] or refused != [True, True]:
        raise SystemExit("changed")
PYTHON
"$work/bin/python" "$work/kernel.py" compiled
TRITON_INTERPRET=1 "$work/bin/python" "$work/kernel.py" interpreted
