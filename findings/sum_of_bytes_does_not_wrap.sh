#!/usr/bin/env bash
# A sum of int8 numbers that becomes an int64 is added in fp32, and does not wrap: 100 + 100 is 200, not -56.
#
# Versions: ascendnpu-ir 1.2.0, for an Ascend910B4 (Python 3.11, Linux). 1.1.0 was seen to do the same.
# Input: what triton-ascend 3.2.0 makes of `(x + x).to(tl.int64)` of int8 numbers: arith.addi of int8, then arith.extsi.
# Expected: -56 of 100, as arith.addi of int8 keeps 8 bits; GPUs, and the same sum stored as int8, have it.
# Seen on 2026-11-30: x is cast to fp16 and fp32, added there, and the sum is cast to int64. No step cuts it to 8 bits:
#     vcast_int8_t_to_half_1d_with_mode vcast_half_to_float_1d_with_mode vadd_1d_float vcast_float_to_int64_t_1d_with_mode
# A way round: widen first, and take the 8 bits where they are wanted.
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
func.func @kernel(%lock: memref<?xi8>, %space: memref<?xi8>, %x: memref<?xi8> {tt.tensor_kind = 0 : i32},
    %y: memref<?xi64> {tt.tensor_kind = 1 : i32}, %gx: i32, %gy: i32, %gz: i32, %px: i32, %py: i32, %pz: i32)
    attributes {SyncBlockLockArgIdx = 0 : i64, WorkspaceArgIdx = 1 : i64, global_kernel = "local", parallel_mode = "simd"} {
  %from = memref.reinterpret_cast %x to offset: [0], sizes: [64], strides: [1] : memref<?xi8> to memref<64xi8, strided<[1]>>
  %room = memref.alloc() : memref<64xi8>
  memref.copy %from, %room : memref<64xi8, strided<[1]>> to memref<64xi8>
  %bytes = bufferization.to_tensor %room restrict writable : memref<64xi8>
  %sum = arith.addi %bytes, %bytes : tensor<64xi8>
  %wide = arith.extsi %sum : tensor<64xi8> to tensor<64xi64>
  %to = memref.reinterpret_cast %y to offset: [0], sizes: [64], strides: [1] : memref<?xi64> to memref<64xi64, strided<[1]>>
  bufferization.materialize_in_destination %wide in writable %to : (tensor<64xi64>, memref<64xi64, strided<[1]>>) -> ()
  return
}
MLIR
bishengir-compile "$work/kernel.mlir" --target=Ascend910B4 --enable-hfusion-compile=true --enable-hivm-compile=true \
  --enable-triton-kernel-compile=true -o "$work/kernel.bin"

seen=$(grep -oE 'call @v[a-z0-9_]+' "$FINAL" | sed 's/call @//' | paste -sd ' ')
echo "$seen"
as_seen="vcast_int8_t_to_half_1d_with_mode vcast_half_to_float_1d_with_mode vadd_1d_float vcast_float_to_int64_t_1d_with_mode"
[ "$seen" = "$as_seen" ] || { echo "changed: the steps are others"; exit 1; }
echo "as on 2026-11-30: nothing cuts the sum to 8 bits"
