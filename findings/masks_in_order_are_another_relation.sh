#!/usr/bin/env bash
# `(x > 0) < (z > 0)`: the compiler compares the masks for another relation.
#
# Versions: ascendnpu-ir 1.0.0 and 1.1.0, for an Ascend910B4 (Python 3.11, Linux). 1.2.0 says "unsupported hfusion::CompareFn".
# Input: what triton-ascend 3.2.0 makes of comparisons of two masks: arith.cmpi ult, ule, ugt and uge of vectors of i1.
# Expected: four relations; of (0, 1) and (1, 0) `<` is true for the first alone.
# Seen on 2026-12-01: both masks are cast to fp16, and the relation in the final module is
#          1.0.0    1.1.0
#     <    !=       vcmp__1d_half: a function whose name lacks the relation
#     <=   !=       the same
#     >    <        the same
#     >=   <        ==
#   Nothing is said.
# A way round: `~a & b` for a < b, `~a | b` for a <= b.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export FINAL=$work/final.mlir

kernel() { # a predicate of arith.cmpi
  cat <<MLIR
func.func @kernel(%lock: memref<?xi8>, %space: memref<?xi8>, %x: memref<?xf32> {tt.tensor_kind = 0 : i32}, %z: memref<?xf32> {tt.tensor_kind = 0 : i32},
    %y: memref<?xi32> {tt.tensor_kind = 1 : i32}, %gx: i32, %gy: i32, %gz: i32, %px: i32, %py: i32, %pz: i32)
    attributes {SyncBlockLockArgIdx = 0 : i64, WorkspaceArgIdx = 1 : i64, global_kernel = "local", parallel_mode = "simd"} {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<64xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<64xf32>) -> tensor<64xf32>
  %from_x = memref.reinterpret_cast %x to offset: [0], sizes: [64], strides: [1] : memref<?xf32> to memref<64xf32, strided<[1]>>
  %room_x = memref.alloc() : memref<64xf32>
  memref.copy %from_x, %room_x : memref<64xf32, strided<[1]>> to memref<64xf32>
  %of_x = bufferization.to_tensor %room_x restrict writable : memref<64xf32>
  %from_z = memref.reinterpret_cast %z to offset: [0], sizes: [64], strides: [1] : memref<?xf32> to memref<64xf32, strided<[1]>>
  %room_z = memref.alloc() : memref<64xf32>
  memref.copy %from_z, %room_z : memref<64xf32, strided<[1]>> to memref<64xf32>
  %of_z = bufferization.to_tensor %room_z restrict writable : memref<64xf32>
  %mask_x = arith.cmpf ogt, %of_x, %zeros : tensor<64xf32>
  %mask_z = arith.cmpf ogt, %of_z, %zeros : tensor<64xf32>
  %compared = arith.cmpi $1, %mask_x, %mask_z : tensor<64xi1>
  %result = arith.extui %compared : tensor<64xi1> to tensor<64xi32>
  %to = memref.reinterpret_cast %y to offset: [0], sizes: [64], strides: [1] : memref<?xi32> to memref<64xi32, strided<[1]>>
  bufferization.materialize_in_destination %result in writable %to : (tensor<64xi32>, memref<64xi32, strided<[1]>>) -> ()
  return
}
MLIR
}

for version in 1.0.0 1.1.0; do
  python3 -m pip install --quiet --no-deps --target "$work/$version" "ascendnpu-ir==$version"
  # The compiler's last step is CANN's hivmc. This one keeps the module that it is given.
  cat >"$work/$version/ascendnpuir/bin/hivmc" <<HIVMC
#!/bin/sh
if [ "\$1" = --version ]; then echo "hivmc $version"; exit; fi
cp "\$1" "\$FINAL"
while [ "\$1" != -o ]; do shift; done
: >"\$2"; : >"\$2.o"
HIVMC
  chmod +x "$work/$version/ascendnpuir/bin/hivmc"
  for predicate in ult ule ugt uge; do
    kernel $predicate >"$work/kernel.mlir"
    PATH=$work/$version/ascendnpuir/bin:$PATH "$work/$version/ascendnpuir/bin/bishengir-compile" "$work/kernel.mlir" --target=Ascend910B4 \
      --enable-hfusion-compile=true --enable-hivm-compile=true --enable-triton-kernel-compile=true -o "$work/kernel.bin"
    last=$(grep -oE 'call @vcmp_[a-z]*_1d_half|f16, .*compare_mode = <[a-z]+>' "$FINAL" | sed -E 's/.*(vcmp_[a-z]*_1d_half|<[a-z]+>)$/\1/')
    echo "$version $predicate: $last"
  done
done | tee "$work/seen"
expected="1.0.0 ult: <ne>
1.0.0 ule: <ne>
1.0.0 ugt: <lt>
1.0.0 uge: <lt>
1.1.0 ult: vcmp__1d_half
1.1.0 ule: vcmp__1d_half
1.1.0 ugt: vcmp__1d_half
1.1.0 uge: vcmp_eq_1d_half"
[ "$(cat "$work/seen")" = "$expected" ] || { echo changed; exit 1; }
