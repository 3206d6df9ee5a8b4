#!/usr/bin/env bash
# triton-ascend: of two helpers that have one name in two modules, a kernel that calls both gets the first one's code twice.
#
# Versions: triton-ascend 3.2.0, pybind11 3.1.0, Python 3.11, Linux; what it makes for the compiler is read, no chip is used.
# Input: plus_one.changed(times_ten.changed(x)), each a @triton.jit function `changed` of its own module; and a helper named `sigmoid`
#   (2 * x) beside tl.sigmoid: tl.sigmoid(sigmoid(x)).
# Expected: 10 * x + 1, and the sigmoid of 2 * x: Python's names, which the kernel's source uses.
# Seen on 2026-11-30, without an error or a warning:
#     plus_one.changed(times_ten.changed(x)): two products with 10, no sum: 100 * x
#     times_ten.changed(plus_one.changed(x)): two sums with 1, no product: x + 2
#     tl.sigmoid(sigmoid(x)): two products with 2, no exponential: 4 * x
#   A helper is kept under its bare name and the types of its arguments; a second one of that name is not compiled. Operators put together
#   of several files (an activation in each, a `_load` in each) change when a kernel begins to use two of them.
# A way round: names of helpers that are unique among all that a kernel can reach, those of triton.language included.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m pip install --quiet --no-deps --target "$work" triton-ascend==3.2.0 pybind11==3.1.0

for helper in "times_ten 10 * x" "plus_one x + 1"; do
  printf 'import triton\n\n\n@triton.jit\ndef changed(x):\n    return %s\n' "${helper#* }" >"$work/${helper%% *}.py"
done
cat >"$work/kernels.py" <<'PYTHON'
import re

import plus_one
import times_ten
import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.backends.ascend.compiler import NPUOptions, make_ttir, ttir_to_linalg
from triton.compiler import ASTSource


@triton.jit
def sigmoid(x):
    return x * 2


@triton.jit
def sum_of_product(x, y):
    o = tl.arange(0, 16)
    tl.store(y + o, plus_one.changed(times_ten.changed(tl.load(x + o))))


@triton.jit
def product_of_sum(x, y):
    o = tl.arange(0, 16)
    tl.store(y + o, times_ten.changed(plus_one.changed(tl.load(x + o))))


@triton.jit
def sigmoid_of_double(x, y):
    o = tl.arange(0, 16)
    tl.store(y + o, tl.sigmoid(sigmoid(tl.load(x + o))))


def linalg(kernel, types, constants):
    """What triton-ascend makes of a kernel."""
    options, context = NPUOptions(), ir.context()
    ir.load_dialects(context)
    source = ASTSource(kernel, types | dict.fromkeys(constants, "constexpr"), constants)
    module = source.make_ir(options, {"min_dot_size": lambda *_: (1, 1, 1)}, {}, context)
    module = make_ttir(module, dict(options.__dict__), options)
    return str(ttir_to_linalg(module, dict(options.__dict__), options, named_ops=True))

seen = []
for kernel in (sum_of_product, product_of_sum, sigmoid_of_double):
    text = linalg(kernel, {"x": "*fp32", "y": "*fp32"}, {})
    seen.append(re.findall(r"(?:arith|math)\.(?:[a-z]+f|exp\w*) ", text) + re.findall(r"constant ([\d.e+]+) : f32", text))
    print(f"{kernel.__name__}:", *seen[-1])
if seen != [["arith.mulf "] * 2 + ["1.000000e+01"], ["arith.addf "] * 2 + ["1.000000e+00"], ["arith.mulf "] * 2 + ["2.000000e+00"]]:
    raise SystemExit("changed")
PYTHON
PYTHONPATH=$work python3 "$work/kernels.py"
