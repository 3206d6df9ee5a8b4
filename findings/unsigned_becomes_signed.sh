#!/usr/bin/env bash
# Vectors of uint16 and uint32 are widened, compared for the larger one and shifted as signed numbers; those of uint8 are not.
#
# Versions: ascendnpu-ir 1.2.0, for an Ascend910B4 (Python 3.11, Linux). 1.0.0 and 1.1.0 were seen to do the same: in 1.0.0's
#   module the cast of uint8 has `cast = <cast_unsigned>`, and that of uint16 has none.
# Input: one operation a kernel, as triton-ascend 3.2.0 writes it: arith.extui, arith.maxui, arith.shrui.
# Expected: instructions for unsigned numbers, or an error. (A cast of uint16 to fp32 is refused, by name.)
# Seen on 2026-11-30, without a warning:
#     widen u8  to i32: vcast_uint8_t_to_half_1d_with_mode vcast_half_to_int32_t_1d_with_mode    right
#     widen u16 to i32: vcast_int16_t_to_float_1d_with_mode vcast_float_to_int32_t_1d_with_mode  65535 becomes -1
#     widen u32 to i64: vcast_int32_t_to_int64_t_1d_with_mode                                    4294967295 becomes -1
#     larger of u16 and 1: vmaxs_vs_1d_int16_t                                                   max(65535, 1) is 1
#     larger of u32 and 1: vmaxs_vs_1d_int32_t
#     shift of u32 by 1: vshrs_vs_1d_int32_t, the routine that i32 is given as well              the sign bit is copied
#   So hashes, random numbers and products of 64 bits that begin with uint32 differ from those of other devices.
# A way round: widen with a mask, `x.to(tl.int64) & 0xFFFFFFFF`; shift with one, `(x >> 1) & 0x7FFFFFFF`.
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
check() { # what it is, type of x, type of y, the operation on %v and %v, the calls that were seen
  cat >"$work/kernel.mlir" <<MLIR
func.func @kernel(%lock: memref<?xi8>, %space: memref<?xi8>, %x: memref<?x$2> {tt.tensor_kind = 0 : i32},
    %y: memref<?x$3> {tt.tensor_kind = 1 : i32}, %gx: i32, %gy: i32, %gz: i32, %px: i32, %py: i32, %pz: i32)
    attributes {SyncBlockLockArgIdx = 0 : i64, WorkspaceArgIdx = 1 : i64, global_kernel = "local", parallel_mode = "simd"} {
  %one = arith.constant 1 : $2
  %from = memref.reinterpret_cast %x to offset: [0], sizes: [64], strides: [1] : memref<?x$2> to memref<64x$2, strided<[1]>>
  %room = memref.alloc() : memref<64x$2>
  memref.copy %from, %room : memref<64x$2, strided<[1]>> to memref<64x$2>
  %v = bufferization.to_tensor %room restrict writable : memref<64x$2>
  %empty = tensor.empty() : tensor<64x$2>
  %ones = linalg.fill ins(%one : $2) outs(%empty : tensor<64x$2>) -> tensor<64x$2>
  %result = $4
  %to = memref.reinterpret_cast %y to offset: [0], sizes: [64], strides: [1] : memref<?x$3> to memref<64x$3, strided<[1]>>
  bufferization.materialize_in_destination %result in writable %to : (tensor<64x$3>, memref<64x$3, strided<[1]>>) -> ()
  return
}
MLIR
  bishengir-compile "$work/kernel.mlir" --target=Ascend910B4 --enable-hfusion-compile=true --enable-hivm-compile=true \
    --enable-triton-kernel-compile=true -o "$work/kernel.bin"
  seen=$(grep -oE 'call @v[a-z0-9_]+' "$FINAL" | sed 's/call @//' | paste -sd' ')
  echo "$1: $seen"
  [ "$seen" = "$5" ] || { echo "  changed: it was $5"; changed=1; }
}
widen='arith.extui %v : tensor<64x'
check "widen u8 to i32" i8 i32 "${widen}i8> to tensor<64xi32>" "vcast_uint8_t_to_half_1d_with_mode vcast_half_to_int32_t_1d_with_mode"
check "widen u16 to i32" i16 i32 "${widen}i16> to tensor<64xi32>" "vcast_int16_t_to_float_1d_with_mode vcast_float_to_int32_t_1d_with_mode"
check "widen u32 to i64" i32 i64 "${widen}i32> to tensor<64xi64>" "vcast_int32_t_to_int64_t_1d_with_mode"
check "larger of u16 and 1" i16 i16 "arith.maxui %v, %ones : tensor<64xi16>" "vmaxs_vs_1d_int16_t"
check "larger of u32 and 1" i32 i32 "arith.maxui %v, %ones : tensor<64xi32>" "vmaxs_vs_1d_int32_t"
check "shift of u32 by 1" i32 i32 "arith.shrui %v, %ones : tensor<64xi32>" "vshrs_vs_1d_int32_t"
exit $changed
