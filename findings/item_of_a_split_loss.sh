#!/usr/bin/env bash
# loss.item() of a loss that was computed from split tensors is one rank's part, and so are float(loss), bool(loss > 2) and prints of them.
#
# Versions: torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11; two ranks, gloo.
# Input: logits [6, 8] and targets [6], Shard(0); their mean, norm and maximum, and a mean cross entropy; the plain ones beside them.
# Expected: the number that the tensor stands for, or the error that .tolist() of a DTensor raises.
# Seen on 2026-11-30, on rank 0, without an error or a warning (the number: full_tensor().item()):
#     cross_entropy .item() 2.156, the number 2.276; mean() .5777, .5548
#     norm() 3.109, 4.320; max() 1.0152, 1.0527; sum() 13.86, 26.63
#   The loss waits for its last exchange ("Partial"). Its backward is right. Logs, early stopping and best checkpoints see a part; a branch
#   on it takes another side on each rank, and the ranks' collectives no longer match.
# A way round: loss.full_tensor().item(), called by every rank.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6

cat >"$work/item.py" <<'PYTHON'
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
x = torch.rand(6, 8) + 0.1
split, target = distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(torch.arange(6), mesh, [Shard(0)])
losses = {
    "cross_entropy": F.cross_entropy(split, target),
    "mean": split.mean(),
    "norm": split.norm(),
    "max": split.max(),
    "sum": split.sum(),
}
seen = {name: (round(loss.item(), 4), round(loss.full_tensor().item(), 4)) for name, loss in losses.items()}
both = [None, None]
dist.all_gather_object(both, seen)
if dist.get_rank() == 0:
    print(both, flush=True)
dist.destroy_process_group()
if any(all(ranks[name][0] == ranks[name][1] for ranks in both) for name in seen):
    raise SystemExit("changed")
PYTHON
PYTHONWARNINGS=ignore "$work/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 "$work/item.py"
