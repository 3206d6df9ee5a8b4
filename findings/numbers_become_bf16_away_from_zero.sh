#!/usr/bin/env bash
# A single number that becomes bf16 is rounded half away from zero, a tile of them half to even.
#
# Versions: ascendnpu-ir 1.0.0, for an Ascend910B4 (Python 3.11, Linux). 1.1.0 and 1.2.0 were seen to round both alike, to even.
# Input: what triton-ascend 3.2.0 makes of `tl.store(y + i, tl.load(x + i).to(tl.bfloat16))` with one i in a loop, and with a range of 64.
# Expected: one rounding for both, that of arith.truncf: 37.125, halfway between two numbers of bf16, becomes 37.0.
# Seen on 2026-12-01: the cast of the number has `round_mode = <round>`, that of the tile none, which is to even: 37.125 becomes 37.25 and 37.0.
#   Nothing is said. Casts to fp16 are not made so.
# A way round: cast a tile.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m pip install --quiet --no-deps --target "$work" ascendnpu-ir==1.0.0

# The compiler's last step is CANN's hivmc. This one keeps the module that it is given.
export FINAL=$work/final.mlir PATH=$work/ascendnpuir/bin:$PATH
cat >"$work/ascendnpuir/bin/hivmc" <<'HIVMC'
#!/bin/sh
if [ "$1" = --version ]; then echo "hivmc 1.0.0"; exit; fi
cp "$1" "$FINAL"
while [ "$1" != -o ]; do shift; done
: >"$2"; : >"$2.o"
HIVMC
chmod +x "$work/ascendnpuir/bin/hivmc"

casts() { # the kernel's body; prints the casts to bf16 of its final module
  cat >"$work/kernel.mlir" <<MLIR
func.func @kernel(%lock: memref<?xi8>, %space: memref<?xi8>, %x: memref<?xf32> {tt.tensor_kind = 0 : i32},
    %y: memref<?xbf16> {tt.tensor_kind = 1 : i32}, %n: i32, %gx: i32, %gy: i32, %gz: i32, %px: i32, %py: i32, %pz: i32)
    attributes {SyncBlockLockArgIdx = 0 : i64, WorkspaceArgIdx = 1 : i64, global_kernel = "local", parallel_mode = "simd"} {
  $1
  return
}
MLIR
  bishengir-compile "$work/kernel.mlir" --target=Ascend910B4 --enable-hfusion-compile=true --enable-hivm-compile=true \
    --enable-triton-kernel-compile=true -o "$work/kernel.bin"
  grep -oE 'hivm\.hir\.vcast .*xbf16.*' "$FINAL" | grep -oE 'round_mode = <[a-z]+>' || echo "no mode"
}

number=$(casts '%zero = arith.constant 0 : i32
  %one = arith.constant 1 : i32
  %first = arith.constant 0 : index
  scf.for %turn = %zero to %n step %one : i32 {
    %i = arith.index_cast %turn : i32 to index
    %from = memref.reinterpret_cast %x to offset: [%i], sizes: [1], strides: [1] : memref<?xf32> to memref<1xf32, strided<[1], offset: ?>>
    %wide = memref.load %from[%first] : memref<1xf32, strided<[1], offset: ?>>
    %narrow = arith.truncf %wide : f32 to bf16
    %empty = tensor.empty() : tensor<1xbf16>
    %result = tensor.insert %narrow into %empty[%first] : tensor<1xbf16>
    %to = memref.reinterpret_cast %y to offset: [%i], sizes: [1], strides: [1] : memref<?xbf16> to memref<1xbf16, strided<[1], offset: ?>>
    bufferization.materialize_in_destination %result in writable %to : (tensor<1xbf16>, memref<1xbf16, strided<[1], offset: ?>>) -> ()
  }')
tile=$(casts '%from = memref.reinterpret_cast %x to offset: [0], sizes: [64], strides: [1] : memref<?xf32> to memref<64xf32, strided<[1]>>
  %room = memref.alloc() : memref<64xf32>
  memref.copy %from, %room : memref<64xf32, strided<[1]>> to memref<64xf32>
  %wide = bufferization.to_tensor %room restrict writable : memref<64xf32>
  %narrow = arith.truncf %wide : tensor<64xf32> to tensor<64xbf16>
  %to = memref.reinterpret_cast %y to offset: [0], sizes: [64], strides: [1] : memref<?xbf16> to memref<64xbf16, strided<[1]>>
  bufferization.materialize_in_destination %narrow in writable %to : (tensor<64xbf16>, memref<64xbf16, strided<[1]>>) -> ()')
echo "a number: $number; a tile: $tile"
[ "$number; $tile" = "round_mode = <round>; no mode" ] || { echo changed; exit 1; }
