#!/usr/bin/env bash
# A mask that is compared with True: `!=` is true everywhere, and `==` false everywhere.
#
# Versions: ascendnpu-ir 1.2.0, for an Ascend910B4 (Python 3.11, Linux). 1.0.0 and 1.1.0 were seen to do the same.
# Input: what triton-ascend 3.2.0 makes of `(x > 0) != True`: arith.cmpi ne of a vector of i1 and a vector that is full of `true`.
# Expected: true where x > 0 is false.
# Seen on 2026-11-30: both sides are cast to fp16 before they are compared. The mask becomes 1.0 where it is set, as an unsigned
#   bit does; the constant becomes -1.0, as a signed bit does. 1.0 and 0.0 both differ from -1.0. Nothing is said:
#     arith.constant -1.000000e+00 : f16
#     vcmp_gt_1d_float vcast_bool_to_half_1d_with_temp broadcast_scalar_half_to_1d vcmp_eq_1d_half vnot_1d_bool ...
# A way round: `~mask`, `mask ^ True`, or a comparison with a mask that was computed, which is cast as the other one is.
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
    %y: memref<?xi32> {tt.tensor_kind = 1 : i32}, %gx: i32, %gy: i32, %gz: i32, %px: i32, %py: i32, %pz: i32)
    attributes {SyncBlockLockArgIdx = 0 : i64, WorkspaceArgIdx = 1 : i64, global_kernel = "local", parallel_mode = "simd"} {
  %zero = arith.constant 0.0 : f32
  %true = arith.constant true
  %from = memref.reinterpret_cast %x to offset: [0], sizes: [64], strides: [1] : memref<?xf32> to memref<64xf32, strided<[1]>>
  %room = memref.alloc() : memref<64xf32>
  memref.copy %from, %room : memref<64xf32, strided<[1]>> to memref<64xf32>
  %values = bufferization.to_tensor %room restrict writable : memref<64xf32>
  %empty = tensor.empty() : tensor<64xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<64xf32>) -> tensor<64xf32>
  %bits = tensor.empty() : tensor<64xi1>
  %trues = linalg.fill ins(%true : i1) outs(%bits : tensor<64xi1>) -> tensor<64xi1>
  %mask = arith.cmpf ogt, %values, %zeros : tensor<64xf32>
  %differs = arith.cmpi ne, %mask, %trues : tensor<64xi1>
  %result = arith.extui %differs : tensor<64xi1> to tensor<64xi32>
  %to = memref.reinterpret_cast %y to offset: [0], sizes: [64], strides: [1] : memref<?xi32> to memref<64xi32, strided<[1]>>
  bufferization.materialize_in_destination %result in writable %to : (tensor<64xi32>, memref<64xi32, strided<[1]>>) -> ()
  return
}
MLIR
bishengir-compile "$work/kernel.mlir" --target=Ascend910B4 --enable-hfusion-compile=true --enable-hivm-compile=true \
  --enable-triton-kernel-compile=true -o "$work/kernel.bin"

seen=$(grep -oE 'arith\.constant -?[0-9.e+]+ : f16|call @(v|broadcast)[a-z0-9_]+' "$FINAL" | sed 's/call @//')
echo "$seen"
for part in 'arith.constant -1.000000e+00 : f16' vcast_bool_to_half_1d_with_temp vcmp_eq_1d_half vnot_1d_bool; do
  grep -qxF -- "$part" <<<"$seen" || { echo "changed: the module has no $part"; exit 1; }
done
echo "as on 2026-11-30: the mask is compared with -1.0"
