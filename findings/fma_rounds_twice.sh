#!/usr/bin/env bash
# tl.fma is not fused: the product is rounded before the sum.
#
# Versions: ascendnpu-ir 1.2.0, for an Ascend910B4 (Python 3.11, Linux). 1.0.0 and 1.1.0 were seen to do the same.
# Input: math.fma of three vectors of fp32, as triton-ascend 3.2.0 writes tl.fma(a, a, b).
# Expected: one rounding. math.fma stands for LLVM's fma, which rounds once, as CUDA's instruction does.
# Seen on 2026-11-30: vmul_1d_float, then vadd_1d_float: two roundings, without a warning.
#   With a = 1 + 2^-12 and b = -(1 + 2^-11) the result is 0, and must be 2^-24. What relies on it loses all that it is for: the error of
#   a product, fma(a, b, -a * b), is always 0, so that sums with compensation and products in twice the precision compensate nothing.
# A way round: split both factors into halves of 12 bits (Dekker's product), which needs no fma.
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

cat >"$work/kernel.mlir" <<'MLIR'
func.func @kernel(%lock: memref<?xi8>, %space: memref<?xi8>, %x: memref<?xf32> {tt.tensor_kind = 0 : i32},
    %y: memref<?xf32> {tt.tensor_kind = 0 : i32}, %z: memref<?xf32> {tt.tensor_kind = 1 : i32},
    %gx: i32, %gy: i32, %gz: i32, %px: i32, %py: i32, %pz: i32)
    attributes {SyncBlockLockArgIdx = 0 : i64, WorkspaceArgIdx = 1 : i64, global_kernel = "local", parallel_mode = "simd"} {
  %from_x = memref.reinterpret_cast %x to offset: [0], sizes: [64], strides: [1] : memref<?xf32> to memref<64xf32, strided<[1]>>
  %room_x = memref.alloc() : memref<64xf32>
  memref.copy %from_x, %room_x : memref<64xf32, strided<[1]>> to memref<64xf32>
  %a = bufferization.to_tensor %room_x restrict writable : memref<64xf32>
  %from_y = memref.reinterpret_cast %y to offset: [0], sizes: [64], strides: [1] : memref<?xf32> to memref<64xf32, strided<[1]>>
  %room_y = memref.alloc() : memref<64xf32>
  memref.copy %from_y, %room_y : memref<64xf32, strided<[1]>> to memref<64xf32>
  %b = bufferization.to_tensor %room_y restrict writable : memref<64xf32>
  %result = math.fma %a, %a, %b : tensor<64xf32>
  %to = memref.reinterpret_cast %z to offset: [0], sizes: [64], strides: [1] : memref<?xf32> to memref<64xf32, strided<[1]>>
  bufferization.materialize_in_destination %result in writable %to : (tensor<64xf32>, memref<64xf32, strided<[1]>>) -> ()
  return
}
MLIR
bishengir-compile "$work/kernel.mlir" --target=Ascend910B4 --enable-hfusion-compile=true --enable-hivm-compile=true \
  --enable-triton-kernel-compile=true -o "$work/kernel.bin"

seen=$(grep -oE 'call @v[a-z0-9_]+' "$FINAL" | sed 's/call @//' | paste -sd' ')
echo "tl.fma: $seen"
[ "$seen" = "vmul_1d_float vadd_1d_float" ] || { echo "changed: it was vmul_1d_float vadd_1d_float"; exit 1; }

python3 - <<'PYTHON'
import struct

def fp32(x):
    return struct.unpack("f", struct.pack("f", x))[0]

a, b = 1 + 2**-12, -(1 + 2**-11)
print(f"a * a + b: rounded twice {fp32(fp32(a * a) + b)}, once {fp32(a * a + b)}")
PYTHON
