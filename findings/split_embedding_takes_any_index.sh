#!/usr/bin/env bash
# F.embedding of a table that is split over ranks gives zeros for an index that the table does not have, where a plain one raises.
#
# Versions: torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11; two ranks, gloo.
# Input: a weight [10, 4], Shard(0), as ColwiseParallel and RowwiseParallel split an embedding, and indices 12 and -1; and indices that
#   are split, with scale_grad_by_freq.
# Expected: IndexError, or the "device-side assert" of a GPU; frequencies among all indices.
# Seen on 2026-11-30, without an error:
#     12 and -1: rows of zeros, and no gradient. Plain: IndexError: index out of range in self
#     index 3 four times, two on a rank, scale_grad_by_freq: a gradient of 2, plain: 1
#   Each rank masks what is not its own, and a row that no rank owns is a sum of zeros. A tokenizer with more ids than the table, an
#   unset label of -100 or -1 that is looked up: training goes on, with tokens that have no embedding. The mean frequency depends on how
#   many ranks the batch is split over.
# A way round: check the ids before they are split, `torch.compile`-able as torch._assert_async of (ids >= 0).all() & (ids < n).all().
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6

cat >"$work/rows.py" <<'PYTHON'
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
weight = torch.ones(10, 4)
split = distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_()

seen = {}
for index in (9, 12, -1):
    indices = torch.tensor([index])
    rows = F.embedding(distribute_tensor(indices, mesh, [Replicate()]), split).full_tensor()
    try:
        plain = F.embedding(indices, weight)[0, 0].item()
    except IndexError:
        plain = "IndexError"
    seen[index] = rows[0, 0].item(), plain
rows.sum().backward()
of_nothing = split.grad.full_tensor().abs().max().item()

whole, repeated = distribute_tensor(weight, mesh, [Replicate()]).requires_grad_(), torch.tensor([3, 3, 3, 3])
F.embedding(distribute_tensor(repeated, mesh, [Shard(0)]), whole, scale_grad_by_freq=True).full_tensor().sum().backward()
by_frequency = whole.grad.full_tensor()[3, 0].item()
if dist.get_rank() == 0:
    print(seen, of_nothing, by_frequency, flush=True)
dist.destroy_process_group()
if seen != {9: (1.0, 1.0), 12: (0.0, "IndexError"), -1: (0.0, "IndexError")} or of_nothing or by_frequency != 2:
    raise SystemExit("changed")
PYTHON
PYTHONWARNINGS=ignore "$work/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 "$work/rows.py"
