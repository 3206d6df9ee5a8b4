#!/usr/bin/env bash
# The last tile of a loop has as many elements as the others: its bound is folded away, and what is behind a row is overwritten.
#
# Versions: ascendnpu-ir 1.2.0, for an Ascend910B4 (Python 3.11, Linux). 1.0.0 and 1.1.0 were seen to do the same.
# Input: what triton-ascend 3.2.0 makes of a loop that carries its range, `o += 64`, with the mask `o < 100` and 100 a constexpr:
#   a tile from `start` has min(start + 64, max(start, 100)) - start elements. Beside it the same with the bound as an argument.
# Expected: two tiles, of 64 elements and of 36, in both.
# Seen on 2026-11-30: with the constant each tile has start + 64 - start elements, 100 does not occur in the module, and the second
#   tile is loaded and stored whole, 28 elements past the end. With the argument min and max are computed. Nothing is said.
# A way round: a range that is made in the loop, `i * 64 + tl.arange(0, 64)`, or the bound as an argument.
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

compile() { # the bound as an MLIR operation; prints how the final module makes the size of a tile
  cat >"$work/kernel.mlir" <<MLIR
func.func @kernel(%lock: memref<?xi8>, %space: memref<?xi8>, %x: memref<?xf32> {tt.tensor_kind = 0 : i32},
    %y: memref<?xf32> {tt.tensor_kind = 1 : i32}, %n: i32, %gx: i32, %gy: i32, %gz: i32, %px: i32, %py: i32, %pz: i32)
    attributes {SyncBlockLockArgIdx = 0 : i64, WorkspaceArgIdx = 1 : i64, global_kernel = "local", parallel_mode = "simd"} {
  %first = arith.constant 0 : index
  %tile = arith.constant 64 : index
  %begin = arith.constant 0 : i32
  %one = arith.constant 1 : i32
  %turns = arith.constant 2 : i32
  %bound = $1
  %end = scf.for %turn = %begin to %turns step %one iter_args(%start = %first) -> (index) : i32 {
    %next = arith.addi %start, %tile : index
    %least = arith.maxsi %start, %bound : index
    %stop = arith.minsi %next, %least : index
    %size = arith.subi %stop, %start : index
    %room = memref.alloc() : memref<64xf32>
    %from = memref.reinterpret_cast %x to offset: [%start], sizes: [64], strides: [1] : memref<?xf32> to memref<64xf32, strided<[1], offset: ?>>
    %some = memref.subview %from[0] [%size] [1] : memref<64xf32, strided<[1], offset: ?>> to memref<?xf32, strided<[1], offset: ?>>
    %part = memref.subview %room[0] [%size] [1] : memref<64xf32> to memref<?xf32, strided<[1]>>
    memref.copy %some, %part : memref<?xf32, strided<[1], offset: ?>> to memref<?xf32, strided<[1]>>
    %all = bufferization.to_tensor %room restrict writable : memref<64xf32>
    %kept = tensor.extract_slice %all[0] [%size] [1] : tensor<64xf32> to tensor<?xf32>
    %to = memref.reinterpret_cast %y to offset: [%start], sizes: [64], strides: [1] : memref<?xf32> to memref<64xf32, strided<[1], offset: ?>>
    %into = memref.subview %to[0] [%size] [1] : memref<64xf32, strided<[1], offset: ?>> to memref<?xf32, strided<[1], offset: ?>>
    bufferization.materialize_in_destination %kept in writable %into : (tensor<?xf32>, memref<?xf32, strided<[1], offset: ?>>) -> ()
    scf.yield %next : index
  }
  return
}
MLIR
  bishengir-compile "$work/kernel.mlir" --target=Ascend910B4 --enable-hfusion-compile=true --enable-hivm-compile=true \
    --enable-triton-kernel-compile=true -o "$work/kernel.bin"
  grep -oE 'affine_map<\([^>]*->[^>]*>|arith\.m(ax|in)si|affine\.m(ax|in)|\b100\b' "$FINAL" | sort | uniq -c
}

echo "the bound is 100:" && constant=$(compile 'arith.constant 100 : index') && echo "$constant"
echo "the bound is an argument:" && argument=$(compile 'arith.index_cast %n : i32 to index') && echo "$argument"
grep -qF 'd0 - s0 + 64' <<<"$constant" || { echo "changed: the size of a tile is another"; exit 1; }
! grep -qE 'm(ax|in)|\b100\b' <<<"$constant" || { echo "changed: the bound is in the module"; exit 1; }
grep -q 'min' <<<"$argument" || { echo "changed: an argument is no bound"; exit 1; }
echo "as on 2026-11-30: a constant bound is folded away"
