#!/usr/bin/env bash
# triton-ascend: tl.arange(24, 40) in the address of a gather is read as tl.arange(0, 16): other elements, inside the tensor.
#
# Versions: triton-ascend 3.2.0, pybind11 3.1.0, Python 3.11, Linux; what it makes for the compiler is read, no chip is used.
# Input: tl.load(x + tl.load(index + o) + tl.arange(START, START + 16)), with START = 0 and with START = 24.
# Expected: addresses that differ by 24 elements, as with START + tl.arange(0, 16).
# Seen on 2026-11-30, without an error or a warning:
#     tl.arange(START, START + 16)     one text for both, letter by letter; 24 is nowhere in it
#     START + tl.arange(0, 16)         differs, with 24 in it
#     tl.arange(24, 40) without loaded indices: right, an offset of 24
#   Elements that are loaded one by one become a loop, which begins at 0 whatever the range does. A kernel that reads the second half of each
#   row by its number (rotary embeddings, gated activations) reads the first half.
# A way round: START + tl.arange(0, 16).
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
def kernel(index, x, y, START: tl.constexpr, APART: tl.constexpr, GATHER: tl.constexpr):
    o = tl.arange(0, 16)
    columns = START + o if APART else tl.arange(START, START + 16)
    rows = tl.load(index + o) if GATHER else 0
    tl.store(y + o, tl.load(x + rows + columns))


def linalg(kernel, types, constants):
    """What triton-ascend makes of a kernel."""
    options, context = NPUOptions(), ir.context()
    ir.load_dialects(context)
    source = ASTSource(kernel, types | dict.fromkeys(constants, "constexpr"), constants)
    module = source.make_ir(options, {"min_dot_size": lambda *_: (1, 1, 1)}, {}, context)
    module = make_ttir(module, dict(options.__dict__), options)
    return str(ttir_to_linalg(module, dict(options.__dict__), options, named_ops=True))


types, seen = {"index": "*i32", "x": "*fp32", "y": "*fp32"}, []
for name, apart, gather in (("tl.arange(START, ...)", 0, 1), ("START + tl.arange(0, 16)", 1, 1), ("tl.arange(START, ...), no gather", 0, 0)):
    at_0, at_24 = (linalg(kernel, types, {"START": start, "APART": apart, "GATHER": gather}) for start in (0, 24))
    seen.append((at_0 == at_24, "24" in at_24))
    print(f"{name}: one text for 0 and 24: {at_0 == at_24}, 24 is in it: {'24' in at_24}")
if seen != [(True, False), (False, True), (False, True)]:
    raise SystemExit("changed")
PYTHON
PYTHONPATH=$work python3 "$work/kernels.py"
