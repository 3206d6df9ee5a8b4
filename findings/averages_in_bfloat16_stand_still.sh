#!/usr/bin/env bash
# Adam of bfloat16 parameters: the second moment never falls, and an average of weights with the decay 0.999 never leaves its start.
#
# Versions: torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11.
# Input: torch.optim.Adam with its default betas: one gradient of 10, then 5000 of 0.01. AveragedModel with get_ema_multi_avg_fn(0.999), as its
#   documentation has it, of a weight that is 1 at the start and 1.5 for 5000 updates.
# Expected: what float32 does, but for a rounding.
# Seen on 2026-11-30, with foreach=True and with fused=True:
#     second moment, of what the one gradient made of it      float32 0.0077, bfloat16 1.000
#     how far the 5000 steps went                             float32 0.66, bfloat16 0.015
#     average of the weight                                   float32 1.4966, bfloat16 1.0
#   bfloat16 has 8 bits: v * 0.999 is rounded back to v, whatever v is, and so is an average that moves by a thousandth of a difference. A state has
#   the parameter's dtype. One bad batch lowers the step of each weight that it reached for the rest of the training; the loss says nothing of it.
# A way round: parameters in float32 under autocast; betas=(0.9, 0.95), which fall; AveragedModel of model.float().
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6

cat >"$work/averages.py" <<'PYTHON'
import warnings

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

warnings.simplefilter("ignore")


def adam(dtype, **options):
    """The second moment after 5000 small gradients, of what one large gradient made of it, and the way that the parameter went."""
    parameter = torch.nn.Parameter(torch.zeros(64, dtype=dtype))
    optimizer = torch.optim.Adam([parameter], **options)
    for i in range(5001):
        parameter.grad = torch.full_like(parameter, 0.01 if i else 10.0)
        optimizer.step()
        if not i:
            first, start = optimizer.state[parameter]["exp_avg_sq"][0].item(), parameter[0].item()
    return optimizer.state[parameter]["exp_avg_sq"][0].item() / first, abs(parameter[0].item() - start)


def average(dtype):
    model = torch.nn.Linear(1, 1, bias=False, dtype=dtype)
    model.weight.data.fill_(1.0)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    averaged.update_parameters(model)
    model.weight.data.fill_(1.5)
    for _ in range(5000):
        averaged.update_parameters(model)
    return averaged.module.weight.item()


seen = {}
for dtype in (torch.float32, torch.bfloat16):
    seen[dtype] = *adam(dtype, foreach=True), *adam(dtype, fused=True), average(dtype)
    moment, way, fused_moment, fused_way, mean = seen[dtype]
    print(f"{dtype}: second moment {moment:.4f} and {fused_moment:.4f} (fused) of the first, way {way:.4f} and {fused_way:.4f}; average {mean:.4f}")
(moment, _, fused_moment, _, mean), (stuck, _, fused_stuck, _, same) = seen.values()
if max(moment, fused_moment) > 0.02 or min(stuck, fused_stuck) < 0.9 or mean < 1.45 or same != 1.0:
    raise SystemExit("changed")
PYTHON
"$work/bin/python" "$work/averages.py"
