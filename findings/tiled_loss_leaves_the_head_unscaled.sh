#!/usr/bin/env bash
# DeepSpeed's TiledFusedLogitsLoss: what the loss is multiplied by, for accumulated batches or fp16, reaches the hidden states and not the head.
#
# Versions: deepspeed 0.19.8, torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11.
# Input: cross entropy of a linear head, 16 tokens in 4 shards; (loss * scale).backward() with 1, 1/4 (four accumulated batches) and 1024 (a
#   loss scale), beside the same loss without shards.
# Expected: gradients that are multiplied by the scale, all of them.
# Seen on 2026-12-01, norms of the gradients of head and hidden states, tiled; plain, without an error or a warning:
#     1      0.532, 0.133; 0.532, 0.133
#     1/4    0.532, 0.0332; 0.133, 0.0332
#     1024   0.532, 136; 544, 136
#   The head's gradient is added to .grad in the forward pass, before the scale is known; backward multiplies that of the hidden states. DeepSpeed's
#   engine divides a loss by the number of accumulated batches, so that the head learns that many times as fast as all else, and clipping
#   by the norm slows the rest; behind an unscaled fp16 loss it learns nothing. Its docstring says that backward runs in forward.
# A way round: the scale inside the function that is given to it, and a loss that is multiplied by nothing.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 setuptools==80.9.0 wheel==0.45.1
DS_BUILD_OPS=0 "$work/bin/pip" install --quiet --no-build-isolation deepspeed==0.19.8

cat >"$work/tiled.py" <<'PYTHON'
import torch
import torch.nn.functional as F
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss


def norms(scale, tiled, inside=False):
    """Of the gradients of the head and of the hidden states."""
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 10, bias=False)
    hidden, labels = torch.randn(1, 16, 8, requires_grad=True), torch.randint(0, 10, (1, 16))

    def loss_of(_, x, y):
        return F.cross_entropy(head(x).view(-1, 10), y.view(-1)) * (scale if inside else 1)

    if tiled:
        loss = TiledFusedLogitsLoss.apply(loss_of, head, hidden, labels, None, 4, [head.weight], "mean")
    else:
        loss = loss_of(None, hidden, labels)
    (loss * (1 if inside else scale)).backward()
    return head.weight.grad.norm().item(), hidden.grad.norm().item()


for scale in (1.0, 0.25, 1024.0):
    tiled, plain, inside = norms(scale, True), norms(scale, False), norms(scale, True, True)
    shown = [f"{head:.3g}, {hidden:.3g}" for head, hidden in (tiled, plain, inside)]
    print(f"times {scale}: tiled {shown[0]}; plain {shown[1]}; scaled inside {shown[2]}")
    far = [abs(ours * factor / must - 1) for ours, must, factor in zip((*tiled, *inside), (*plain, *plain), (scale, 1, 1, 1))]
    if max(far) > 1e-3:
        raise SystemExit("changed")
PYTHON
"$work/bin/python" "$work/tiled.py"
