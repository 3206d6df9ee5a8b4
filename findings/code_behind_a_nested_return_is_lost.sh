#!/usr/bin/env bash
# triton-ascend: `if a > 0: if a > 1: return`, and then more code. Where a is 0, the code behind it does not run.
#
# Versions: triton-ascend 3.2.0, pybind11 3.1.0, Python 3.11, Linux; what it makes for the compiler is read, no chip is used.
# Input: a kernel that stores unless flag > 0 and flag > 1, with the return in two nested branches, and with one condition.
# Expected: both store where flag is 0 and where it is 1.
# Seen on 2026-12-01, without an error or a warning:
#     nested           one store, in the `else` of flag > 1, which is inside `if flag > 0`; `if flag > 0` has no `else`
#     one condition    one store, in the `else` of the condition
#   In Triton's own IR a branch for flag <= 0 and one for flag == 1 lead to the store. In the structured form one of them has it.
#   Later front ends refuse such kernels (FlagTree #1241).
# A way round: one condition for a return, or the rest of the kernel in a branch.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m pip install --quiet --no-deps --target "$work" triton-ascend==3.2.0 pybind11==3.1.0

cat >"$work/kernels.py" <<'PYTHON'
import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.backends.ascend.compiler import NPUOptions, make_ttir, ttir_to_linalg
from triton.compiler import ASTSource


@triton.jit
def nested(y, flag):
    if flag > 0:
        if flag > 1:
            return
    tl.store(y + tl.arange(0, 16), 7.0)


@triton.jit
def one_condition(y, flag):
    if (flag > 0) & (flag > 1):
        return
    tl.store(y + tl.arange(0, 16), 7.0)


def linalg(kernel, types):
    """What triton-ascend makes of a kernel."""
    options, context = NPUOptions(), ir.context()
    ir.load_dialects(context)
    module = ASTSource(kernel, types).make_ir(options, {"min_dot_size": lambda *_: (1, 1, 1)}, {}, context)
    module = make_ttir(module, dict(options.__dict__), options)
    return str(ttir_to_linalg(module, dict(options.__dict__), options, named_ops=True))


def branches(text):
    """The nested branches around each store."""
    around, found = [], []
    for line in map(str.strip, text.splitlines()):
        if line == "}" and around:
            around.pop()
        elif line == "} else {":
            around[-1] = "else"
        elif line.startswith("scf.if"):
            around.append("if")
        elif line.startswith("bufferization.materialize"):
            found.append(tuple(around))
    return found


seen = {kernel.__name__: branches(linalg(kernel, {"y": "*fp32", "flag": "i32"})) for kernel in (nested, one_condition)}
print(seen)
if seen != {"nested": [("if", "else")], "one_condition": [("else",)]}:
    raise SystemExit("changed")
PYTHON
PYTHONPATH=$work python3 "$work/kernels.py"
