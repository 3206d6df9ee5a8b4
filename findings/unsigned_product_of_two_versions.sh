#!/usr/bin/env bash
# The 64-bit product of two uint32 is a signed one with the compiler of CANN 9.0, and right with the next one.
#
# Versions: ascendnpu-ir 1.1.0 and 1.2.0, for an Ascend910B4 (Python 3.11, Linux). 1.0.0 was seen to do as 1.1.0 does.
# Input: arith.mului_extended of two vectors, which triton-ascend 3.2.0 makes of `((x.to(tl.uint64) * y) >> 32).to(tl.uint32)`: the way
#   to write the high half of a product by hand, as hashes, Philox and division by a multiplication do.
# Expected: the high half of the unsigned product: of 0xFFFFFFFF and 0xFFFFFFFF it is 0xFFFFFFFE.
# Seen on 2026-11-30:
#     1.1.0: arith.mulsi_extended, the operands widened by arith.extsi: -1 times -1, whose high half is 0
#     1.2.0: arith.mului_extended, the operands widened by arith.extui
#   The only warning, of both, is that the operation is slow: it is a loop over single elements.
# A way round with 1.0.0 and 1.1.0: products of halves of 16 bits, with a mask after each shift.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The compiler's last step is CANN's hivmc. This one keeps the module that it is given.
export FINAL=$work/final.mlir PATH=$work:$PATH
cat >"$work/hivmc" <<'HIVMC'
#!/bin/sh
if [ "$1" = --version ]; then echo "hivmc 1.2.0"; exit; fi
cp "$1" "$FINAL"
while [ "$1" != -o ]; do shift; done
: >"$2"; : >"$2.o"
HIVMC
chmod +x "$work/hivmc"

cat >"$work/kernel.mlir" <<'MLIR'
func.func @kernel(%lock: memref<?xi8>, %space: memref<?xi8>, %x: memref<?xi32> {tt.tensor_kind = 0 : i32},
    %y: memref<?xi32> {tt.tensor_kind = 0 : i32}, %z: memref<?xi32> {tt.tensor_kind = 1 : i32},
    %gx: i32, %gy: i32, %gz: i32, %px: i32, %py: i32, %pz: i32)
    attributes {SyncBlockLockArgIdx = 0 : i64, WorkspaceArgIdx = 1 : i64, global_kernel = "local", parallel_mode = "simd"} {
  %from_x = memref.reinterpret_cast %x to offset: [0], sizes: [64], strides: [1] : memref<?xi32> to memref<64xi32, strided<[1]>>
  %room_x = memref.alloc() : memref<64xi32>
  memref.copy %from_x, %room_x : memref<64xi32, strided<[1]>> to memref<64xi32>
  %a = bufferization.to_tensor %room_x restrict writable : memref<64xi32>
  %from_y = memref.reinterpret_cast %y to offset: [0], sizes: [64], strides: [1] : memref<?xi32> to memref<64xi32, strided<[1]>>
  %room_y = memref.alloc() : memref<64xi32>
  memref.copy %from_y, %room_y : memref<64xi32, strided<[1]>> to memref<64xi32>
  %b = bufferization.to_tensor %room_y restrict writable : memref<64xi32>
  %low, %high = arith.mului_extended %a, %b : tensor<64xi32>
  %to = memref.reinterpret_cast %z to offset: [0], sizes: [64], strides: [1] : memref<?xi32> to memref<64xi32, strided<[1]>>
  bufferization.materialize_in_destination %high in writable %to : (tensor<64xi32>, memref<64xi32, strided<[1]>>) -> ()
  return
}
MLIR

changed=0
while read -r version expected; do
  python3 -m pip install --quiet --no-deps --target "$work/$version" "ascendnpu-ir==$version"
  "$work/$version/ascendnpuir/bin/bishengir-compile" "$work/kernel.mlir" --target=Ascend910B4 --enable-hfusion-compile=true \
    --enable-hivm-compile=true --enable-triton-kernel-compile=true -o "$work/kernel.bin"
  seen=$(grep -oE 'arith\.(ext[su]i|mul[su]i_extended) ' "$FINAL" | sort -u | paste -sd' ' | sed 's/  */ /g')
  echo "$version: $seen"
  [ "${seen% }" = "$expected" ] || { echo "  changed: it was $expected"; changed=1; }
  rm -rf "${work:?}/$version"
done <<'VERSIONS'
1.1.0 arith.extsi arith.mulsi_extended
1.2.0 arith.extui arith.mului_extended
VERSIONS
exit $changed
