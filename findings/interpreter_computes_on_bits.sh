#!/usr/bin/env bash
# Triton's interpreter adds, multiplies and compares bfloat16 numbers by their bits, as integers of 16 bits, and says nothing.
#
# Versions: triton 3.9.0, torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11. triton-ascend 3.2.0's does so too, but compares rightly.
# Input: x = 3, -1, 0.25, 2 and y = 1.0078125, 2, 3, -4 in bfloat16, which holds them; TRITON_INTERPRET=1.
# Expected: float16's results, which are exact; or an error, as tl.sqrt of bfloat16 raises: the manual's page on debugging says that the
#   interpreter does not support operations on bfloat16.
# Seen on 2026-11-30, bfloat16 beside float16:
#     x * y: 1.63e-19, 0, -1.08e-19, 0 (3.02, -2, 0.75, -8); x + y: nan, -inf, 1.28e+38, 1.18e-38 (4.01, 1, 3.25, -2)
#     maximum(x, y): 3, -1, 3, -4 (3, 2, 3, 2); x > 0.5: true, true, false, true (true, false, false, true)
#     1, 2, 3 cast from int32: 0, 0, 5.88e-39 (1, 2, 3); tl.dot of 3s and 1.0078125s, 16 of each: 4.28e+09 (48.4)
#   numpy has no bfloat16, so that the interpreter keeps its bits as uint16; casts, loads and stores know of it, operations do not. x > 0.5 is
#   true of every number below 0. A kernel that is right on a GPU fails here, and a mask or maximum of positive numbers passes by luck.
# A way round: .to(tl.float32) behind each load, also of tl.dot's operands (also shown).
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet triton==3.9.0 torch==2.13.0 numpy==2.4.6

cat >"$work/bits.py" <<'PYTHON'
import torch
import triton
import triton.language as tl


@triton.jit
def kernel(x, y, product, total, largest, is_positive, integers, dot, of_float32, N: tl.constexpr):
    o = tl.arange(0, N)
    a, b = tl.load(x + o), tl.load(y + o)
    tl.store(product + o, a * b)
    tl.store(total + o, a + b)
    tl.store(largest + o, tl.maximum(a, b))
    tl.store(is_positive + o, tl.where(a > 0.5, 1.0, 0.0))
    tl.store(integers + o, (o + 1).to(a.dtype))
    square = o[:, None] * N + o[None, :]
    tl.store(dot + square, tl.dot(tl.load(x + square * 0), tl.load(y + square * 0)))
    tl.store(of_float32 + o, a.to(tl.float32) * b.to(tl.float32))


def run(dtype):
    x, y = torch.tensor([[3.0, -1.0, 0.25, 2.0], [1.0078125, 2.0, 3.0, -4.0]]).repeat(1, 4).to(dtype)
    results = [torch.zeros(16, 16) for _ in range(7)]
    kernel[(1,)](x, y, *results, 16)
    return [[f"{number:.3g}" for number in result[0, :4].tolist()] for result in results]


names = ["x * y", "x + y", "maximum(x, y)", "x > 0.5", "integers", "dot", "x * y in float32"]
right, seen = run(torch.float16), run(torch.bfloat16)
for name, ours, must in zip(names, seen, right):
    print(f"{name}: {' '.join(ours)} (float16: {' '.join(must)})")
if [ours == must for ours, must in zip(seen, right)] != [False] * 6 + [True] or seen[3] != ["1", "1", "0", "1"]:
    raise SystemExit("changed")
PYTHON
TRITON_INTERPRET=1 "$work/bin/python" "$work/bits.py"
