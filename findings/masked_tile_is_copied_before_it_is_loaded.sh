#!/usr/bin/env bash
# A tile that is loaded with a mask, and whose pairs are split: a copy of it is made before it is loaded.
#
# Versions: triton-ascend 3.2.0, pybind11 3.1.0, ascendnpu-ir 1.2.0, for an Ascend910B4 (Python 3.11, Linux). 1.1.0 was seen to do the same.
# Input: 128 numbers as rows of 64: the maximum of each row, and the sums of neighbours by `tl.reshape(x, (2, 32, 2)).split()`; the numbers are
#   loaded with a mask, and without. bitsandbytes' quantize_nf4_blockwise_kernel is such a kernel.
# Expected: what is loaded is what is computed with, in both.
# Seen on 2026-12-01: without a mask the tile is loaded into rows of pairs that begin at every 32 bytes. With one, such a buffer is filled first, from
#   another that nothing has written yet; then that other one is filled with zeros and loaded, and no later call reads it:
#     copy_ubuf_to_ubuf_2d_float broadcast_scalar_float_to_2d load_gm_to_ubuf_1d_float reduce_max_ara_float ...
#   Maxima and sums are those of whatever was in the buffer. Nothing is said.
# A way round: a load without a mask, or two loads, of x + 2 * o and of x + 2 * o + 1, in place of the split.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m pip install --quiet --no-deps --target "$work" triton-ascend==3.2.0 pybind11==3.1.0 ascendnpu-ir==1.2.0

# The compiler's last step is CANN's hivmc. This one keeps the module that it is given.
export FINAL=$work/final.mlir PATH=$work/ascendnpuir/bin:$PATH
cat >"$work/ascendnpuir/bin/hivmc" <<'HIVMC'
#!/bin/sh
if [ "$1" = --version ]; then echo "hivmc 1.2.0"; exit; fi
cp "$1" "$FINAL"
while [ "$1" != -o ]; do shift; done
: >"$2"; : >"$2.o"
HIVMC
chmod +x "$work/ascendnpuir/bin/hivmc"

cat >"$work/kernels.py" <<'PYTHON'
import sys

import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.backends.ascend.compiler import NPUOptions, make_ttir, ttir_to_linalg
from triton.compiler import ASTSource


@triton.jit
def kernel(x, largest, y, n, MASKED: tl.constexpr):
    o = tl.arange(0, 128)
    values = tl.load(x + o, mask=o < n, other=0.0) if MASKED else tl.load(x + o)
    values = tl.reshape(values, (2, 64))
    tl.store(largest + tl.arange(0, 2), tl.max(values, 1))
    even, odd = tl.reshape(values, (2, 32, 2)).split()
    tl.store(y + tl.arange(0, 64), tl.reshape(even + odd, (64,)))


def linalg(kernel, types, constants):
    """What triton-ascend makes of a kernel."""
    options, context = NPUOptions(), ir.context()
    ir.load_dialects(context)
    source = ASTSource(kernel, types | dict.fromkeys(constants, "constexpr"), constants)
    module = source.make_ir(options, {"min_dot_size": lambda *_: (1, 1, 1)}, {}, context)
    module = make_ttir(module, dict(options.__dict__), options)
    return str(ttir_to_linalg(module, dict(options.__dict__), options, named_ops=True))


types = {"x": "*fp32", "largest": "*fp32", "y": "*fp32", "n": "i32"}
print(linalg(kernel, types, {"MASKED": int(sys.argv[1])}))
PYTHON

for masked in 0 1; do
  PYTHONPATH=$work python3 "$work/kernels.py" $masked >"$work/kernel.mlir"
  bishengir-compile "$work/kernel.mlir" --target=Ascend910B4 --enable-hfusion-compile=true --enable-hivm-compile=true \
    --enable-triton-kernel-compile=true -o "$work/kernel.bin"
  # What moves or fills the tile before the first maximum is taken.
  moves=$(grep -oE 'call @[a-z0-9_]+' "$FINAL" | sed 's/call @//; /reduce_max/,$d' | tr '\n' ' ')
  echo "MASKED=$masked: $moves"
  case $masked in
    0) expected="load_gm_to_ubuf_2d_float " ;;
    1) expected="copy_ubuf_to_ubuf_2d_float broadcast_scalar_float_to_2d load_gm_to_ubuf_1d_float " ;;
  esac
  [ "$moves" = "$expected" ] || { echo changed; exit 1; }
done
