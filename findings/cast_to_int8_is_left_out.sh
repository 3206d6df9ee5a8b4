#!/usr/bin/env bash
# A cast of fp32 to int8 and back is left out: quantisation that a kernel tries out does nothing, not even the rounding.
#
# Versions: ascendnpu-ir 1.2.0, for an Ascend910B4 (Python 3.11, Linux). 1.0.0 and 1.1.0 were seen to do the same, also with uint8.
# Input: what triton-ascend 3.2.0 makes of `x.to(tl.int8).to(tl.float32)`: arith.fptosi to i8, then arith.sitofp. Beside it the same with i32.
# Expected: 2 of 2.7, as with i32, and as every other device has it.
# Seen on 2026-11-30, all vector instructions, without a warning:
#     through i32: vcast_float_to_int32_t_1d_with_mode vcast_int32_t_to_float_1d_with_mode
#     through i8:  none: x is copied to y
#   A step of training with simulated int8 weights or activations is one without, and its error is that of no quantisation at all.
# A way round: an integer type in between, `x.to(tl.int8).to(tl.int32).to(tl.float32)`.
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

compile() { # the type that x goes through
  cat >"$work/kernel.mlir" <<MLIR
func.func @kernel(%lock: memref<?xi8>, %space: memref<?xi8>, %x: memref<?xf32> {tt.tensor_kind = 0 : i32},
    %y: memref<?xf32> {tt.tensor_kind = 1 : i32}, %gx: i32, %gy: i32, %gz: i32, %px: i32, %py: i32, %pz: i32)
    attributes {SyncBlockLockArgIdx = 0 : i64, WorkspaceArgIdx = 1 : i64, global_kernel = "local", parallel_mode = "simd"} {
  %from = memref.reinterpret_cast %x to offset: [0], sizes: [64], strides: [1] : memref<?xf32> to memref<64xf32, strided<[1]>>
  %room = memref.alloc() : memref<64xf32>
  memref.copy %from, %room : memref<64xf32, strided<[1]>> to memref<64xf32>
  %numbers = bufferization.to_tensor %room restrict writable : memref<64xf32>
  %whole = arith.fptosi %numbers : tensor<64xf32> to tensor<64x$1>
  %back = arith.sitofp %whole : tensor<64x$1> to tensor<64xf32>
  %to = memref.reinterpret_cast %y to offset: [0], sizes: [64], strides: [1] : memref<?xf32> to memref<64xf32, strided<[1]>>
  bufferization.materialize_in_destination %back in writable %to : (tensor<64xf32>, memref<64xf32, strided<[1]>>) -> ()
  return
}
MLIR
  bishengir-compile "$work/kernel.mlir" --target=Ascend910B4 --enable-hfusion-compile=true --enable-hivm-compile=true \
    --enable-triton-kernel-compile=true -o "$work/kernel.bin"
  { grep -oE 'call @v[a-z0-9_]+' "$FINAL" || true; } | sed 's/call @//' | paste -sd ' '
}

through_i32=$(compile i32) through_i8=$(compile i8)
echo "through i32: $through_i32"
echo "through i8: ${through_i8:-none}"
[ "$through_i32" = "vcast_float_to_int32_t_1d_with_mode vcast_int32_t_to_float_1d_with_mode" ] || { echo "changed: i32 has other steps"; exit 1; }
[ -z "$through_i8" ] || { echo "changed: i8 has steps"; exit 1; }
