#!/usr/bin/env bash
# peft: OFT with coft=True does not train: at its default eps no adapter moves the layer by more than a ten-thousandth.
#
# Versions: peft 0.21.2, transformers 5.24.0, accelerate 1.15.0, torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11.
# Input: a linear layer of 64, and targets that are its outputs for rotated inputs, which OFT can match; one block, 100 steps of Adam.
# Expected: a constrained rotation that learns a part of it. eps is "the control strength", with the default 6e-5.
# Seen on 2026-11-30, mean squared error before and after, and the largest change of the outputs, of the largest one:
#     coft=False               0.6971, 0.0134; 1.3
#     coft=True                0.6971, 0.6971; 2e-5
#     coft=True, eps=0.1       0.6971, 0.6813; 0.04
#   The limit is on the norm of the whole skew matrix, and not on a number in it, and 6e-5 does not grow with a block. Gradients flow, and the
#   optimizer's states fill: each forward pass sets the parameters back. The loss is that of a frozen layer, with no warning.
# A way round: coft=False, or eps of 1 and more.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet peft==0.21.2 transformers==5.24.0 accelerate==1.15.0 torch==2.13.0 numpy==2.4.6

cat >"$work/rotation.py" <<'PYTHON'
import logging
import warnings

import peft
import torch

warnings.simplefilter("ignore")
logging.disable()


def train(**options):
    """The error before and after training, and how much the outputs have changed."""
    torch.manual_seed(0)
    x, layer = torch.randn(256, 64), torch.nn.Sequential(torch.nn.Linear(64, 64))
    rotation = torch.linalg.qr(torch.randn(64, 64))[0]
    target = layer(x @ rotation).detach()
    before = layer(x).detach()
    model = peft.get_peft_model(layer, peft.OFTConfig(target_modules=["0"], oft_block_size=64, use_cayley_neumann=False, **options))
    optimizer = torch.optim.Adam([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)
    losses = []
    for _ in range(100):
        loss = (model(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    change = ((model(x) - before).abs().max() / before.abs().max()).item()
    return losses[0], losses[-1], change


free, constrained, wide = train(), train(coft=True), train(coft=True, eps=0.1)
for name, (first, last, change) in {"free": free, "coft": constrained, "coft, eps=0.1": wide}.items():
    print(f"{name}: error {first:.4f}, after 100 steps {last:.4f}; change of the outputs {change:.2g}")
if free[1] > 0.1 or constrained[2] > 1e-4 or wide[1] < 0.6:
    raise SystemExit("changed")
PYTHON
"$work/bin/python" "$work/rotation.py"
