#!/usr/bin/env bash
# A convolution of a DTensor that is split by anything but its batch is one rank's part, and calls itself the whole result.
#
# Versions: torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11; two ranks, gloo.
# Input: x [4, 4, 8], weight [6, 4, 3], F.conv1d with padding 1, as in audio and state space models; and F.conv2d of [4, 4, 8, 8] in patches.
# Expected: the plain result, or the NotImplementedError of an operator without a rule; F.linear is right in all these cases.
# Seen on 2026-11-30, gathered, without an error (conv2d: the same):
#     the batch is split                          right
#     the weight's output channels are split      [4, 3, 8] for [4, 6, 8]: 3 of 6 channels
#     the sequence is split                       [4, 6, 4] for [4, 6, 8]: 4 of 8 positions
#     the input channels of both are split        [4, 6, 8], one rank's partial sums: off by about the largest value
#   The result's placement is Replicate(), so full_tensor(), and each layer behind it, takes one rank's part. What a model is told by
#   ColwiseParallel for a linear layer is done to a convolution with half of the channels lost. PyTorch's #186129 is to mend depthwise ones.
# A way round: redistribute to Replicate() or to the batch before the convolution.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6

cat >"$work/convolutions.py" <<'PYTHON'
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
generator = torch.Generator().manual_seed(0)
splits = {
    "the batch": (Shard(0), Replicate()),
    "output channels": (Replicate(), Shard(0)),
    "the sequence": (Shard(2), Replicate()),
    "input channels": (Shard(1), Shard(1)),
}


def parts(function, x, weight, **options):
    """Of each split, the shape and placement of the result, and whether it is the plain one."""
    x, weight = (torch.randn(*shape, generator=generator) for shape in (x, weight))
    must, found = function(x, weight, **options), {}
    for name, placements in splits.items():
        y = function(*(distribute_tensor(each, mesh, [placement]) for each, placement in zip((x, weight), placements)), **options)
        whole = y.full_tensor()
        found[name] = tuple(whole.shape), str(y.placements[0]), whole.shape == must.shape and torch.allclose(whole, must, atol=1e-5)
    return found


seen = {
    "conv1d": parts(F.conv1d, (4, 4, 8), (6, 4, 3), padding=1),
    "conv2d": parts(F.conv2d, (4, 4, 8, 8), (6, 4, 2, 2), stride=2),
}
if dist.get_rank() == 0:
    for name, found in seen.items():
        for split, (shape, placement, right) in found.items():
            print(f"{name}, {split} split: {shape}, {placement}, {'right' if right else 'wrong'}", flush=True)
dist.destroy_process_group()
if any([right for *_, right in found.values()] != [True, False, False, False] for found in seen.values()):
    raise SystemExit("changed")
PYTHON
PYTHONWARNINGS=ignore "$work/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 "$work/convolutions.py"
