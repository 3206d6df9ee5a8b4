#!/usr/bin/env bash
# The sum of a mask: triton-ascend writes its parity, and the compiler makes "any" of that. Neither is the number of its elements.
#
# Versions: ascendnpu-ir 1.2.0, for an Ascend910B4 (Python 3.11, Linux). 1.0.0 and 1.1.0 were seen to do the same.
# Input: what triton-ascend 3.2.0 makes of `tl.sum(x > 0, 0)`: linalg.reduce with arith.addi of i1. Triton 3.9.0 sums masks in int32.
# Expected of that IR: addition modulo 2, so 1 for 35 elements and 0 for 36; or an error. Expected by who wrote the kernel: 35 and 36.
# Seen on 2026-11-30: the mask is cast to fp16, and its largest element is taken: 1 for 35 and for 36 elements, without a warning.
#     vcmp_gt_1d_float vcast_bool_to_half_1d_with_temp ..._reduce_max_r_half ...
#   The parity is seen by whoever reads or executes the IR, "any" is what a module holds; a test with one element set passes with all three.
# A way round: `tl.sum((x > 0).to(tl.int32), 0)`.
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
  %false = arith.constant false
  %first = arith.constant 0 : index
  %from = memref.reinterpret_cast %x to offset: [0], sizes: [64], strides: [1] : memref<?xf32> to memref<64xf32, strided<[1]>>
  %room = memref.alloc() : memref<64xf32>
  memref.copy %from, %room : memref<64xf32, strided<[1]>> to memref<64xf32>
  %values = bufferization.to_tensor %room restrict writable : memref<64xf32>
  %empty = tensor.empty() : tensor<64xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<64xf32>) -> tensor<64xf32>
  %mask = arith.cmpf ogt, %values, %zeros : tensor<64xf32>
  %bit = tensor.empty() : tensor<i1>
  %none = linalg.fill ins(%false : i1) outs(%bit : tensor<i1>) -> tensor<i1>
  %sum = linalg.reduce ins(%mask : tensor<64xi1>) outs(%none : tensor<i1>) dimensions = [0]
    (%in: i1, %so_far: i1) {
      %next = arith.addi %in, %so_far : i1
      linalg.yield %next : i1
    }
  %number = tensor.extract %sum[] : tensor<i1>
  %wide = arith.extui %number : i1 to i32
  %one = tensor.empty() : tensor<1xi32>
  %result = tensor.insert %wide into %one[%first] : tensor<1xi32>
  %to = memref.reinterpret_cast %y to offset: [0], sizes: [1], strides: [1] : memref<?xi32> to memref<1xi32, strided<[1]>>
  bufferization.materialize_in_destination %result in writable %to : (tensor<1xi32>, memref<1xi32, strided<[1]>>) -> ()
  return
}
MLIR
bishengir-compile "$work/kernel.mlir" --target=Ascend910B4 --enable-hfusion-compile=true --enable-hivm-compile=true \
  --enable-triton-kernel-compile=true -o "$work/kernel.bin"

seen=$(grep -oE 'call @[a-z0-9_]+' "$FINAL" | sed 's/call @//' | grep -vE '^(load|store)' | paste -sd' ')
echo "$seen"
[[ $seen == *reduce_max_r_half* && $seen != *xor* ]] || { echo "changed: it was a reduction to the largest, of fp16"; exit 1; }
