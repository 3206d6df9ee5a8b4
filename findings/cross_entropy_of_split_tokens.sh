#!/usr/bin/env bash
# F.cross_entropy of logits that are split by tokens is the mean of each rank's mean: ignored tokens and class weights bias it.
#
# Versions: torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11; two ranks, gloo.
# Input: DTensors of logits [8, 10] and targets [8], both Shard(0), where the first rank has three ignored targets and the other none;
#   and all of them with a weight for each class. reduction="mean".
# Expected: the loss of the plain tensors; or the error that 7 tokens on two ranks raise ("cannot be evenly sharded, resulting in biased
#   mean result"), which looks at the number of tokens and not at those that count.
# Seen on 2026-11-30; the first rank's tokens are all but certain, the other's are not:
#     ignored targets: a loss of 1.2276 for 1.8726; class weights: 1.2276 for 1.7054; the gradient is right in both
#   So the curves of a run on one rank and on two differ where their weights do not, and a batch's loss depends on which rank its padding is on.
# A way round: reduction="sum" over the number of targets that count. With the vocabulary split (loss_parallel) the mean is right.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6

cat >"$work/means.py" <<'PYTHON'
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
target = torch.arange(8)
values = torch.zeros(8, 10)
values[:4].scatter_(1, target[:4, None], 4.0)  # the first rank's tokens are certain, the other's are not
padded = torch.tensor([-100, -100, -100, 3, 4, 5, 6, 7])
weights = torch.arange(1.0, 11.0)


def losses(target, weight=None):
    """Of plain and of split tensors, and how far their gradients are apart."""
    plain, split = values.clone().requires_grad_(), distribute_tensor(values, mesh, [Shard(0)]).requires_grad_()
    wanted = F.cross_entropy(plain, target, weight)
    of_ranks = None if weight is None else distribute_tensor(weight, mesh, [Replicate()])
    found = F.cross_entropy(split, distribute_tensor(target, mesh, [Shard(0)]), of_ranks)
    wanted.backward()
    found.backward()
    apart = (split.grad.full_tensor() - plain.grad).abs().max()
    return round(wanted.item(), 4), round(found.full_tensor().item(), 4), round(apart.item(), 4)


seen = {"all count": losses(target), "ignored": losses(padded), "weighted": losses(target, weights)}
if dist.get_rank() == 0:
    print(seen, flush=True)
dist.destroy_process_group()
(all_plain, all_split, _), *others = seen.values()
if all_plain != all_split or any(plain == split or apart for plain, split, apart in others):
    raise SystemExit("changed")
PYTHON
PYTHONWARNINGS=ignore "$work/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 "$work/means.py"
