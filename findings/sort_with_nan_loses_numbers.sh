#!/usr/bin/env bash
# tl.sort and tl.topk of a row with one NaN lose numbers that are no NaN, double others, and may hide the NaN.
#
# Versions: triton 3.9.0, torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11, Triton's interpreter.
# Expected: an order of the numbers that came in, the NaN first or last; torch.sort puts it last. At worst some other order of them.
# Seen on 2026-11-30:
#     [1, 2, 3, nan] -> [1, 2, 1, 2]             3 and the NaN are gone; topk of 2 is [2, 1]
#     [3, nan, 1, 2] -> [1, 2, 3, 3]             the NaN is gone; topk of 2 is [3, 3]
#     [nan, 3, 1, 2] -> [nan, nan, nan, nan]     1, 2 and 3 are gone; topk of 2 is [2, 1]
#   The sort is written in Triton, so that devices are given the same steps (none was used here). Each of two places decides for itself,
#   by `x > y`, whether to take the other's number. That is false both ways where one is NaN: both keep what they have, or both end with
#   the same number. A check of the result for NaN does not see it.
# A way round: tl.where(x == x, x, float("-inf")) before the sort.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet triton==3.9.0 torch==2.13.0 numpy==2.4.6

cat >"$work/kernel.py" <<'PYTHON'
import torch
import triton
import triton.language as tl


@triton.jit
def sort_kernel(x, y, z, N: tl.constexpr, K: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(y + o, tl.sort(tl.load(x + o)))
    tl.store(z + tl.arange(0, K), tl.topk(tl.load(x + o), K))


nan = float("nan")
seen = []
for row in ([1.0, 2.0, 3.0, nan], [3.0, nan, 1.0, 2.0], [nan, 3.0, 1.0, 2.0]):
    y, z = torch.zeros(4), torch.zeros(2)
    sort_kernel[(1,)](torch.tensor(row), y, z, 4, 2)
    print(row, "sorted", y.tolist(), "topk", z.tolist(), "torch", torch.tensor(row).sort().values.tolist())
    seen.append((str(y.tolist()), str(z.tolist())))
if seen != [
    ("[1.0, 2.0, 1.0, 2.0]", "[2.0, 1.0]"),
    ("[1.0, 2.0, 3.0, 3.0]", "[3.0, 3.0]"),
    ("[nan, nan, nan, nan]", "[2.0, 1.0]"),
]:
    raise SystemExit("changed")
PYTHON
TRITON_INTERPRET=1 "$work/bin/python" "$work/kernel.py"
