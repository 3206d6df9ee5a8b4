#!/usr/bin/env bash
# F.mse_loss of DTensors that are split over n ranks has a gradient n times too large, as have smooth_l1, huber, binary cross entropy.
#
# Versions: torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11; two ranks, gloo.
# Input: x and its target [6, 8], both Shard(0) or both Shard(1), reduction="mean"; gathered gradients, beside those of the plain tensors.
# Expected: the gradient of the loss that is returned, which is right; as l1_loss, kl_div, binary_cross_entropy_with_logits and
#   (x - target).square().mean() give it.
# Seen on 2026-11-30:
#     mse_loss, smooth_l1_loss, huber_loss, binary_cross_entropy, soft_margin_loss: loss 1.0 of the plain one's, gradient 2.0, no error
#   Each has an operator of its own for the gradient, which runs on a rank's part and divides by that part's number of elements.
#   Where a hidden state is distilled by mse_loss beside a cross entropy, the balance of the two depends on the number of ranks; alone it
#   looks like another learning rate, and an optimizer that normalises its steps hides it.
# A way round: reduction="sum" over the number of elements, or the formula written out.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6

cat >"$work/losses.py" <<'PYTHON'
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
values, target = torch.rand(6, 8) * 0.8 + 0.1, torch.rand(6, 8)


def ratios(loss, dim):
    """Of split tensors to plain ones: the loss, and the largest element of its gradient."""
    plain = values.clone().requires_grad_()
    split = distribute_tensor(values, mesh, [Shard(dim)]).requires_grad_()
    wanted, found = loss(plain, target), loss(split, distribute_tensor(target, mesh, [Shard(dim)]))
    wanted.backward()
    found.backward()
    of_loss = found.full_tensor() / wanted
    of_gradient = split.grad.full_tensor().abs().max() / plain.grad.abs().max()
    return round(of_loss.item(), 3), round(of_gradient.item(), 3)


names = ["mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss", "l1_loss"]
losses = {name: getattr(F, name) for name in [*names, "binary_cross_entropy_with_logits", "kl_div"]}
losses["written out"] = lambda x, target: (x - target).square().mean()
losses["sum over count"] = lambda x, target: F.mse_loss(x, target, reduction="sum") / x.numel()
seen = {name: {ratios(loss, dim) for dim in (0, 1)} for name, loss in losses.items()}
if dist.get_rank() == 0:
    print(seen, flush=True)
dist.destroy_process_group()
if any(found != {(1.0, 2.0 if name in names[:5] else 1.0)} for name, found in seen.items()):
    raise SystemExit("changed")
PYTHON
PYTHONWARNINGS=ignore "$work/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 "$work/losses.py"
