#!/usr/bin/env bash
# cumsum(-1), cumprod(-1) and logcumsumexp(-1) of a DTensor that is split along its last dimension begin again on every rank.
#
# Versions: torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11; two ranks, gloo.
# Input: ones [2, 8], Shard(1), which is how a head that is split by its vocabulary gives probabilities.
# Expected: 1 to 8, as cumsum(1) of the same tensor gives them.
# Seen on 2026-11-30, gathered, without an error or a warning:
#     cumsum(1)     1 2 3 4 5 6 7 8        cumsum(-1)        1 2 3 4 1 2 3 4
#     cumprod(1)    of 2: 2 to 256         cumprod(-1)       of 2: 2 4 8 16 2 4 8 16
#     cummax(-1), sort(-1), softmax(-1): right
#   Whether the split dimension is the one that is summed is asked with -1 as it stands. cumsum(-1) of sorted probabilities is how top-p
#   sampling cuts; mask.cumsum(-1) - 1 is how positions are made.
# A way round: x.cumsum(x.ndim - 1).
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6

cat >"$work/sums.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))


def row(function, value, dim):
    split = distribute_tensor(torch.full((2, 8), value), mesh, [Shard(1)])
    return [round(number) for number in function(split, dim).full_tensor()[0].tolist()]


seen = {
    (name, dim): row(function, value, dim)
    for name, function, value in (
        ("cumsum", lambda x, dim: x.cumsum(dim), 1.0),
        ("cumprod", lambda x, dim: x.cumprod(dim), 2.0),
        ("logcumsumexp", lambda x, dim: x.logcumsumexp(dim).exp(), 0.0),
        ("cummax", lambda x, dim: (x.sort(dim).values * x.cumsum(1)).cummax(dim).values, 1.0),
        ("softmax", lambda x, dim: 8 * x.softmax(dim), 1.0),
    )
    for dim in (1, -1)
}
if dist.get_rank() == 0:
    print(seen, flush=True)
dist.destroy_process_group()
again, right = [1, 2, 3, 4, 1, 2, 3, 4], list(range(1, 9))
expected = {"cumsum": (right, again), "cumprod": ([2**i for i in right], [2**i for i in again]), "logcumsumexp": (right, again)}
expected |= {"cummax": (right, right), "softmax": ([1] * 8, [1] * 8)}
if any((seen[name, 1], seen[name, -1]) != both for name, both in expected.items()):
    raise SystemExit("changed")
PYTHON
PYTHONWARNINGS=ignore "$work/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 "$work/sums.py"
