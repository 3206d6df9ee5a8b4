#!/usr/bin/env bash
# triton-ascend: a tile of a tensor descriptor that crosses the tensor's end is loaded and stored whole.
#
# Versions: triton-ascend 3.2.0, pybind11 3.1.0, Python 3.11, Linux; what it makes for the compiler is read, no chip is used.
# Input: tl.make_tensor_descriptor of [rows, columns] in tiles of [16, 32]; the tile at [48, 64] is loaded from one and stored to another.
#   Beside it the same with tl.make_block_ptr and boundary_check.
# Expected: as in Triton's documentation of descriptors, elements outside the shape are zeros when loaded, and are not stored. So the number of
#   rows, an argument of the kernel, is read.
# Seen on 2026-12-01, without an error or a warning: with the descriptors neither rows nor columns are used by any operation, and all
#   16 x 32 elements move both ways. With block pointers they are, and fewer may.
# A way round: block pointers with boundary_check, or pointers with masks.
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
def descriptors(x, y, rows, columns):
    source = tl.make_tensor_descriptor(x, [rows, columns], [100, 1], [16, 32])
    target = tl.make_tensor_descriptor(y, [rows, columns], [100, 1], [16, 32])
    target.store([48, 64], source.load([48, 64]))


@triton.jit
def block_pointers(x, y, rows, columns):
    source = tl.make_block_ptr(x, (rows, columns), (100, 1), (48, 64), (16, 32), (1, 0))
    target = tl.make_block_ptr(y, (rows, columns), (100, 1), (48, 64), (16, 32), (1, 0))
    tl.store(target, tl.load(source, boundary_check=(0, 1), padding_option="zero"), boundary_check=(0, 1))


def linalg(kernel, types):
    """What triton-ascend makes of a kernel."""
    options, context = NPUOptions(), ir.context()
    ir.load_dialects(context)
    module = ASTSource(kernel, types).make_ir(options, {"min_dot_size": lambda *_: (1, 1, 1)}, {}, context)
    module = make_ttir(module, dict(options.__dict__), options)
    return str(ttir_to_linalg(module, dict(options.__dict__), options, named_ops=True))


seen = {}
for kernel in (descriptors, block_pointers):
    head, body = linalg(kernel, {"x": "*fp32", "y": "*fp32", "rows": "i32", "columns": "i32"}).split("attributes", 1)
    rows, columns = re.findall(r"(%arg\d+): i32", head)[:2]
    copied = re.findall(r"memref\.copy .*: memref<([\dx?]+)xf32", body)
    seen[kernel.__name__] = [len(re.findall(rf"{name}\b", body)) > 0 for name in (rows, columns)], copied
    print(kernel.__name__, "uses rows, columns:", *seen[kernel.__name__][0], "copies", copied)
if seen != {"descriptors": ([False, False], ["16x32"]), "block_pointers": ([True, True], ["?x?"])}:
    raise SystemExit("changed")
PYTHON
PYTHONPATH=$work python3 "$work/kernels.py"
