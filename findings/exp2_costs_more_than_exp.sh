#!/usr/bin/env bash
# tl.exp2 costs one instruction more than tl.exp, and is less exact: kernels that were tuned for CUDA use it to save one.
#
# Versions: ascendnpu-ir 1.2.0, for an Ascend910B4 (Python 3.11, Linux). 1.0.0 and 1.1.0 were seen to do the same.
# Input: math.exp, math.exp2, math.log and math.log2 of a vector, as triton-ascend 3.2.0 writes tl.exp, tl.exp2, tl.log and tl.log2.
# Expected, from CUDA, whose hardware has ex2 and lg2 alone: exp2 is the one instruction, and exp the product with log2(e) before it.
#   So attention kernels scale their logits by log2(e) once, and call exp2 in the loop.
# Seen on 2026-11-30: the vector unit has exp and ln alone.
#     exp:  vexp_1d_float
#     exp2: vmuls_vs_1d_float vexp_1d_float
#     log:  vln_1d_float
#     log2: vln_1d_float broadcast_scalar_float_to_1d vln_1d_float vdiv_1d_float     ln(2) is computed each time
#   The product with ln(2) is rounded to fp32. Even with an exact exp, exp2(100) is off by 2.1e-6, 17.6 times fp32's epsilon, so that
#   scales of block formats (MX) that are made with it are no powers of two.
# A way round: exp and log, without the factor; whole powers of two by their bits, `((n + 127) << 23).to(tl.float32, bitcast=True)`.
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
check() { # operation, the calls that were seen
  cat >"$work/kernel.mlir" <<MLIR
func.func @kernel(%lock: memref<?xi8>, %space: memref<?xi8>, %x: memref<?xf32> {tt.tensor_kind = 0 : i32},
    %y: memref<?xf32> {tt.tensor_kind = 1 : i32}, %gx: i32, %gy: i32, %gz: i32, %px: i32, %py: i32, %pz: i32)
    attributes {SyncBlockLockArgIdx = 0 : i64, WorkspaceArgIdx = 1 : i64, global_kernel = "local", parallel_mode = "simd"} {
  %from = memref.reinterpret_cast %x to offset: [0], sizes: [64], strides: [1] : memref<?xf32> to memref<64xf32, strided<[1]>>
  %room = memref.alloc() : memref<64xf32>
  memref.copy %from, %room : memref<64xf32, strided<[1]>> to memref<64xf32>
  %values = bufferization.to_tensor %room restrict writable : memref<64xf32>
  %result = math.$1 %values : tensor<64xf32>
  %to = memref.reinterpret_cast %y to offset: [0], sizes: [64], strides: [1] : memref<?xf32> to memref<64xf32, strided<[1]>>
  bufferization.materialize_in_destination %result in writable %to : (tensor<64xf32>, memref<64xf32, strided<[1]>>) -> ()
  return
}
MLIR
  bishengir-compile "$work/kernel.mlir" --target=Ascend910B4 --enable-hfusion-compile=true --enable-hivm-compile=true \
    --enable-triton-kernel-compile=true -o "$work/kernel.bin"
  seen=$(grep -oE 'call @(v|broadcast)[a-z0-9_]+' "$FINAL" | sed 's/call @//' | paste -sd' ')
  echo "$1: $seen"
  [ "$seen" = "$2" ] || { echo "  changed: it was $2"; changed=1; }
}
check exp "vexp_1d_float"
check exp2 "vmuls_vs_1d_float vexp_1d_float"
check log "vln_1d_float"
check log2 "vln_1d_float broadcast_scalar_float_to_1d vln_1d_float vdiv_1d_float"

# exp2(n) with the product in fp32 and an exact exp.
python3 - <<'PYTHON'
import math, struct

def fp32(x):
    return struct.unpack("f", struct.pack("f", x))[0]

for n in (10, 100, 127):
    print(f"exp2({n}): off by {(math.exp(fp32(n * fp32(math.log(2)))) / 2.0**n - 1) * 2**23:.1f} epsilon")
PYTHON
exit $changed
