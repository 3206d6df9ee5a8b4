#!/usr/bin/env bash
# The sum of norms of a DTensor's rows, split along the rows, is the norm of the ranks' sums; of counts by any() each rank's are added.
#
# Versions: torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11; two ranks, gloo.
# Input: x and y [6, 8], Shard(1), which is how the output of a layer that is split by columns lies. Results are gathered.
# Expected: those of the plain tensors, as norm(dim=1).mean(), amax(1).sum() and logsumexp(1).sum() give them.
# Seen on 2026-11-30, split for plain, without an error:
#     x.norm(dim=1).sum() 10.3187 for 10.5005, torch.linalg.vector_norm(x, dim=1).sum() the same; the gradient is right
#     F.pairwise_distance(x, y).sum() 7.5149 for 7.5969        F.cosine_embedding_loss(x, y, 1) 1.2794 for .2794
#     (x > .9).any(1).sum() 7 for 5
#   A norm over ranks is pending ("_NormPartial") when the rows are added, and what is pending is a norm: the root of the sum of squares
#   of each rank's sum. mean() gathers first. So a penalty on rows (group lasso, z-loss on norms) or the loss of an embedding model
#   is too small by what the ranks have apart.
# A way round: x.norm(dim=1).redistribute(mesh, [Replicate()]).sum().
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6

cat >"$work/norms.py" <<'PYTHON'
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
x, y, ones = torch.rand(6, 8) + 0.1, torch.rand(6, 8), torch.ones(6)
split = [distribute_tensor(x, mesh, [Shard(1)]), distribute_tensor(y, mesh, [Shard(1)]), distribute_tensor(ones, mesh, [Replicate()])]


def both(function):
    """Of the plain tensors and of the split ones."""
    found = function(*split)
    assert isinstance(found, DTensor)
    return round(function(x, y, ones).item(), 4), round(found.full_tensor().item(), 4)


wrong = {
    "norm": both(lambda x, y, ones: x.norm(dim=1).sum()),
    "vector_norm": both(lambda x, y, ones: torch.linalg.vector_norm(x, dim=1).sum()),
    "pairwise_distance": both(lambda x, y, ones: F.pairwise_distance(x, y).sum()),
    "cosine_embedding_loss": both(F.cosine_embedding_loss),
    "any": both(lambda x, y, ones: (x > 0.9).any(1).sum()),
}
right = {
    "norm, mean": both(lambda x, y, ones: x.norm(dim=1).mean()),
    "amax": both(lambda x, y, ones: x.amax(1).sum()),
    "logsumexp": both(lambda x, y, ones: x.logsumexp(1).sum()),
    "norm of all": both(lambda x, y, ones: x.norm()),
}
if dist.get_rank() == 0:
    print(wrong, right, flush=True)
dist.destroy_process_group()
if any(plain == found for plain, found in wrong.values()) or any(abs(plain - found) > 2e-4 for plain, found in right.values()):
    raise SystemExit("changed")
PYTHON
PYTHONWARNINGS=ignore "$work/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 "$work/norms.py"
