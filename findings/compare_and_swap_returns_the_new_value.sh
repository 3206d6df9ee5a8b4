#!/usr/bin/env bash
# triton-ascend: tl.atomic_cas returns what it has written, not what was there: a free lock looks taken to the one who took it.
#
# Versions: triton-ascend 3.2.0, pybind11 3.1.0, Python 3.11, Linux; what it makes for the compiler is read, no chip is used.
# Input: tl.store(old, tl.atomic_cas(lock, 0, 1)); beside it tl.atomic_add and tl.atomic_xchg of the same lock.
# Expected: "the old value", as tl.atomic_cas is documented, and as the two others return it: 0 where the lock was free.
# Seen on 2026-11-30, the order of the operations on the lock, without an error or a warning:
#     tl.atomic_cas                  update, then a copy of the lock, which is stored as the old value: 1
#     tl.atomic_add, tl.atomic_xchg  copy, then update
#   `while tl.atomic_cas(lock, 0, 1) == 1`, as Triton's tutorial on layer norm takes its lock, waits for itself. Where the value only tells who
#   is first, nobody is, and the work that the first one does is left out.
# A way round: partial results, which a second launch puts together; an atomic sum.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m pip install --quiet --no-deps --target "$work" triton-ascend==3.2.0 pybind11==3.1.0

cat >"$work/kernels.py" <<'PYTHON'
import re

import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.backends.ascend.compiler import NPUOptions, make_ttir, ttir_to_linalg
from triton.compiler import ASTSource


@triton.jit
def kernel(lock, old, WHICH: tl.constexpr):
    if WHICH == "cas":
        before = tl.atomic_cas(lock, 0, 1)
    elif WHICH == "add":
        before = tl.atomic_add(lock, 1)
    else:
        before = tl.atomic_xchg(lock, 1)
    tl.store(old, before)


def linalg(kernel, types, constants):
    """What triton-ascend makes of a kernel."""
    options, context = NPUOptions(), ir.context()
    ir.load_dialects(context)
    source = ASTSource(kernel, types | dict.fromkeys(constants, "constexpr"), constants)
    module = source.make_ir(options, {"min_dot_size": lambda *_: (1, 1, 1)}, {}, context)
    module = make_ttir(module, dict(options.__dict__), options)
    return str(ttir_to_linalg(module, dict(options.__dict__), options, named_ops=True))


seen = {}
for which in ("cas", "add", "exch"):
    text = linalg(kernel, {"lock": "*i32", "old": "*i32"}, {"WHICH": which})
    lock = re.search(r"(%\w+) = memref.reinterpret_cast %arg2 ", text)[1]
    of_lock = [line for line in text.splitlines() if re.search(rf"{lock}\b(?!_)", line)]
    seen[which] = ["update" if "GenericAtomicRMW" in line else "copy" for line in of_lock if "GenericAtomicRMW" in line or "copy" in line]
    print(f"{which}:", ", then ".join(seen[which]))
if seen != {"cas": ["update", "copy"], "add": ["copy", "update"], "exch": ["copy", "update"]}:
    raise SystemExit("changed")
PYTHON
PYTHONPATH=$work python3 "$work/kernels.py"
