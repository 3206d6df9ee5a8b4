#!/usr/bin/env bash
# Quotients of int32 vectors and remainders of fp32 vectors come of one division in fp32: above 2^24 they are off by one, or all wrong.
#
# Versions: ascendnpu-ir 1.2.0, for an Ascend910B4 (Python 3.11, Linux). 1.0.0 and 1.1.0 were seen to do the same.
# Input: arith.divsi of vectors of i32 and hfusion's mod of vectors of f32, as triton-ascend 3.2.0 writes `a // b` and `a % b`.
# Expected: exact results, which integers have by definition and fmod has in C and on CUDA.
# Seen on 2026-11-30, without a warning:
#     a // b, int32: both are cast to fp32, divided, and cast back: 50331647 // 3 is 16777216, and must be 16777215
#     a % b, fp32: a - trunc(a / b) * b, each step rounded: 1e8 % 3 is 0, and must be 1; 1e6 % 0.1 is 0, and must be 0.0851
#   int64 quotients, int32 remainders and single numbers are not made so: `a % b` of integers is right where `a // b` is wrong, and
#   `(a // b) * b + a % b` is not a.
# A way round: int64 for indices of 2^24 and above (a loop over single elements), or a quotient of single numbers.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m pip install --quiet --no-deps --target "$work" ascendnpu-ir==1.2.0

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

changed=0
check() { # what it is, type, operation, the calls that were seen
  cat >"$work/kernel.mlir" <<MLIR
func.func @kernel(%lock: memref<?xi8>, %space: memref<?xi8>, %x: memref<?x$2> {tt.tensor_kind = 0 : i32},
    %y: memref<?x$2> {tt.tensor_kind = 0 : i32}, %z: memref<?x$2> {tt.tensor_kind = 1 : i32},
    %gx: i32, %gy: i32, %gz: i32, %px: i32, %py: i32, %pz: i32)
    attributes {SyncBlockLockArgIdx = 0 : i64, WorkspaceArgIdx = 1 : i64, global_kernel = "local", parallel_mode = "simd"} {
  %from_x = memref.reinterpret_cast %x to offset: [0], sizes: [64], strides: [1] : memref<?x$2> to memref<64x$2, strided<[1]>>
  %room_x = memref.alloc() : memref<64x$2>
  memref.copy %from_x, %room_x : memref<64x$2, strided<[1]>> to memref<64x$2>
  %a = bufferization.to_tensor %room_x restrict writable : memref<64x$2>
  %from_y = memref.reinterpret_cast %y to offset: [0], sizes: [64], strides: [1] : memref<?x$2> to memref<64x$2, strided<[1]>>
  %room_y = memref.alloc() : memref<64x$2>
  memref.copy %from_y, %room_y : memref<64x$2, strided<[1]>> to memref<64x$2>
  %b = bufferization.to_tensor %room_y restrict writable : memref<64x$2>
  %empty = tensor.empty() : tensor<64x$2>
  %result = $3
  %to = memref.reinterpret_cast %z to offset: [0], sizes: [64], strides: [1] : memref<?x$2> to memref<64x$2, strided<[1]>>
  bufferization.materialize_in_destination %result in writable %to : (tensor<64x$2>, memref<64x$2, strided<[1]>>) -> ()
  return
}
MLIR
  bishengir-compile "$work/kernel.mlir" --target=Ascend910B4 --enable-hfusion-compile=true --enable-hivm-compile=true \
    --enable-triton-kernel-compile=true -o "$work/kernel.bin"
  seen=$(grep -oE 'call @v[a-z0-9_]+' "$FINAL" | sed 's/call @//' | paste -sd' ')
  echo "$1: $seen"
  [ "$seen" = "$4" ] || { echo "  changed: it was $4"; changed=1; }
}
check "a // b of int32" i32 "arith.divsi %a, %b : tensor<64xi32>" \
  "vcast_int32_t_to_float_1d_with_mode vcast_int32_t_to_float_1d_with_mode vdiv_1d_float vcast_float_to_int32_t_1d_with_mode"
check "a % b of fp32" f32 "hfusion.elemwise_binary {fun = #hfusion.binary_fn<mod>} ins(%a, %b : tensor<64xf32>, tensor<64xf32>)
    outs(%empty : tensor<64xf32>) -> tensor<64xf32>" \
  "vdiv_1d_float vcast_float_to_float_1d_with_mode vcast_float_to_float_1d_with_mode vmul_1d_float vsub_1d_float"

# The same steps in Python.
python3 - <<'PYTHON'
import math, struct

def fp32(x):
    return struct.unpack("f", struct.pack("f", x))[0]

a = 50331647
print(f"{a} // 3: {math.trunc(fp32(fp32(a) / 3))}, must be {a // 3}")
for a, b in ((1e8, 3.0), (1e6, fp32(0.1))):
    print(f"{a:g} % {b:g}: {fp32(a - fp32(math.trunc(fp32(a / b)) * b))}, must be {math.fmod(a, b):.4g}")
PYTHON
exit $changed
