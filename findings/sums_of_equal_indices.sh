#!/usr/bin/env bash
# An embedding's gradient in bfloat16 stops at 256 occurrences of a token on a CPU; other ways to write that sum go on.
#
# Versions: torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11.
# Input: 1000 gradients of 1 for one row, in bfloat16. In float16 the same happens at 2048.
# Expected: 1000, which bfloat16 holds, as torch.sum gives it: it adds in float32 and rounds once.
# Seen on 2026-11-30:
#     F.embedding(...).backward(): 256, index_put_(accumulate=True): 256, index_add_ of numbers: 256
#     index_add_ of rows, even of one element: 1000, scatter_add_ of rows or numbers: 1000, sum: 1000
#   Where each addition is rounded, 256 + 1 is 256. The gradient of a frequent token is too small by any factor, and a reference on a CPU
#   says that a kernel which adds in float32 is wrong.
# A way round: F.embedding(index, weight.float()), whose gradient is rounded once.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6

cat >"$work/sums.py" <<'PYTHON'
import torch
import torch.nn.functional as F

index = torch.zeros(1000, dtype=torch.long)
ones = torch.ones(1000, 8, dtype=torch.bfloat16)


def table():
    return torch.zeros(4, 8, dtype=torch.bfloat16)


weight = table().requires_grad_()
F.embedding(index, weight).backward(ones)
seen = {
    "embedding": weight.grad,
    "index_add_ of rows": table().index_add_(0, index, ones),
    "index_add_ of numbers": table()[:, 0].clone().index_add_(0, index, ones[:, 0].clone())[:, None],
    "index_put_": table().index_put_((index,), ones, accumulate=True),
    "scatter_add_ of rows": table().scatter_add_(0, index[:, None].expand(1000, 8), ones),
    "scatter_add_ of numbers": table()[:, 0].clone().scatter_add_(0, index, ones[:, 0].clone())[:, None],
    "sum": ones.sum(0, keepdim=True),
}
seen = {name: result[0, 0].item() for name, result in seen.items()}
print(seen)
stops = {name for name, result in seen.items() if result == 256}
if stops != {"embedding", "index_add_ of numbers", "index_put_"} or set(seen.values()) != {256.0, 1000.0}:
    raise SystemExit("changed")
PYTHON
"$work/bin/python" "$work/sums.py"
