#!/usr/bin/env bash
# Without CANN, the Ascend compiler writes nothing and ends with exit status 0.
#
# Versions: ascendnpu-ir 1.0.0, 1.1.0 and 1.2.0 (Python 3.11, Linux, no hivmc on PATH). The largest has 533 MB.
# Expected: an exit status other than 0 where the file that -o names is not written.
# Seen on 2026-11-30: 1.0.0 and 1.1.0 print "[ERROR] Cannot find hivmc under $PATH", write no file, and end with 0. 1.2.0 ends with 1.
#   So `bishengir-compile ... && use kernel.bin`, `make` and `subprocess.run(check=True)` go on with the file of the compilation before,
#   where there is one.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if command -v hivmc >/dev/null; then echo "hivmc is on PATH: this is about machines without it"; exit 1; fi

cat >"$work/kernel.mlir" <<'MLIR'
func.func @kernel(%lock: memref<?xi8>, %space: memref<?xi8>, %x: memref<?xf32> {tt.tensor_kind = 0 : i32},
    %y: memref<?xf32> {tt.tensor_kind = 1 : i32}, %gx: i32, %gy: i32, %gz: i32, %px: i32, %py: i32, %pz: i32)
    attributes {SyncBlockLockArgIdx = 0 : i64, WorkspaceArgIdx = 1 : i64, global_kernel = "local", parallel_mode = "simd"} {
  %from = memref.reinterpret_cast %x to offset: [0], sizes: [64], strides: [1] : memref<?xf32> to memref<64xf32, strided<[1]>>
  %room = memref.alloc() : memref<64xf32>
  memref.copy %from, %room : memref<64xf32, strided<[1]>> to memref<64xf32>
  %values = bufferization.to_tensor %room restrict writable : memref<64xf32>
  %result = math.exp %values : tensor<64xf32>
  %to = memref.reinterpret_cast %y to offset: [0], sizes: [64], strides: [1] : memref<?xf32> to memref<64xf32, strided<[1]>>
  bufferization.materialize_in_destination %result in writable %to : (tensor<64xf32>, memref<64xf32, strided<[1]>>) -> ()
  return
}
MLIR

changed=0
while read -r version expected; do
  python3 -m pip install --quiet --no-deps --target "$work/$version" "ascendnpu-ir==$version"
  status=0
  "$work/$version/ascendnpuir/bin/bishengir-compile" "$work/kernel.mlir" --target=Ascend910B4 --enable-hfusion-compile=true \
    --enable-hivm-compile=true --enable-triton-kernel-compile=true -o "$work/kernel.bin" 2>"$work/said" || status=$?
  written=$(find "$work" -maxdepth 1 -name 'kernel.*' ! -name kernel.mlir | wc -l)
  echo "$version: exit status $status, $written files written, $(grep -om1 'Cannot find hivmc' "$work/said")"
  [ "$status $written" = "$expected 0" ] || { echo "  changed: it was exit status $expected, 0 files"; changed=1; }
  rm -rf "${work:?}/$version"
done <<'VERSIONS'
1.0.0 0
1.1.0 0
1.2.0 1
VERSIONS
exit $changed
