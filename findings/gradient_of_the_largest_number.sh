#!/usr/bin/env bash
# The gradient of a DTensor's largest number, amax() or norm(inf), is NaN, and infinite at that number.
#
# Versions: torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11; two ranks, gloo.
# Input: x [8, 6] of normal numbers, Shard(0) and Shard(1).
# Expected: the plain tensor's gradient, 1 at the largest number and 0 elsewhere, as x.max() and x.amax((0, 1)) give it.
# Seen on 2026-11-30, for both ways to split it; the values are right, and nothing is said:
#     x.amax(), x.abs().amax(), x.norm(p=inf), vector_norm(x, inf), vector_norm(x, -inf)    infinite at the number, NaN elsewhere
#     x.max(), x.amax((0, 1)), x.amax(0).sum(), x.amin(), vector_norm(x, inf, dim=0).sum()  right
#   amax() and amax((0, 1)) are one function; only with the second one is the maximum gathered before it is compared. A penalty on the largest
#   weight or logit, or a scale of quantisation that is differentiated, makes every parameter NaN at the first step; on one rank it trains.
# A way round: x.max(), or amax with all dimensions.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6

cat >"$work/largest.py" <<'PYTHON'
import math

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
values = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
norm = torch.linalg.vector_norm
functions = {
    "amax()": lambda x: x.amax(),
    "abs().amax()": lambda x: x.abs().amax(),
    "norm(p=inf)": lambda x: x.norm(p=math.inf),
    "vector_norm(inf)": lambda x: norm(x, math.inf),
    "vector_norm(-inf)": lambda x: norm(x, -math.inf),
    "max()": lambda x: x.max(),
    "amax((0, 1))": lambda x: x.amax((0, 1)),
    "amax(0).sum()": lambda x: x.amax(0).sum(),
    "amin()": lambda x: x.amin(),
    "vector_norm(inf, dim=0).sum()": lambda x: norm(x, math.inf, dim=0).sum(),
}


def gradient(function, dim):
    """Of the split tensor: how many elements are NaN and infinite, and whether it and the value are the plain one's."""
    plain, split = values.clone().requires_grad_(), distribute_tensor(values, mesh, [Shard(dim)]).requires_grad_()
    must, found = function(plain), function(split)
    (wanted,), (got,) = torch.autograd.grad(must, plain), torch.autograd.grad(found, split)
    got = got.full_tensor()
    assert torch.allclose(found.full_tensor(), must)
    return got.isnan().sum().item(), got.isinf().sum().item(), torch.equal(got, wanted)


seen = {name: [gradient(function, dim) for dim in (0, 1)] for name, function in functions.items()}
if dist.get_rank() == 0:
    for name, found in seen.items():
        print(f"{name}: NaN, infinite, right: {found[0]} (Shard(0)), {found[1]} (Shard(1))", flush=True)
dist.destroy_process_group()
if any(found != [(47, 1, False)] * 2 for found in list(seen.values())[:5]) or any(found != [(0, 0, True)] * 2 for found in list(seen.values())[5:]):
    raise SystemExit("changed")
PYTHON
PYTHONWARNINGS=ignore "$work/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 "$work/largest.py"
