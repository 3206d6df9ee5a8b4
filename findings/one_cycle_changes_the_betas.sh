#!/usr/bin/env bash
# DeepSpeed's OneCycle sets Adam's second beta to 0.99 when it is made, and its "decay" of momentum raises the first beta above 1.
#
# Versions: deepspeed 0.19.8, torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11.
# Input: Adam with its own betas, 0.9 and 0.999; OneCycle of 10 steps up and 10 down, cycle_min_mom=0.85, cycle_max_mom=0.95, then a decay with
#   decay_step_size=10, decay_lr_rate=0.1 and decay_mom_rate=0.1; 120 steps on a quadratic.
# Expected: a second beta that stays; a first one that falls behind the cycle, as the learning rate does by the same formula.
# Seen on 2026-12-01, without an error or a warning, betas:
#     made        0.85, 0.99; 0.9, 0.999 before
#     step 21     0.9595, 0.99; the learning rate falls
#     step 26     1.007, 0.99; loss 1.948
#     step 120    1.9, 0.99; loss 1.951. With cycle_momentum=False 0.9, 0.999 and 1.929. torch.optim.Adam refuses to be made with 1.9
#   The learning rate is divided by 1 + rate * steps, momentum multiplied by it. cycle_momentum is True by default, so that the second beta
#   is changed without decay_mom_rate too: the second moment forgets ten times as fast. Repairs wait as DeepSpeed's #8495 and #8589.
# A way round: cycle_momentum=False.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 setuptools==80.9.0 wheel==0.45.1
DS_BUILD_OPS=0 "$work/bin/pip" install --quiet --no-build-isolation deepspeed==0.19.8

cat >"$work/cycle.py" <<'PYTHON'
import torch
from deepspeed.runtime.lr_schedules import OneCycle

CYCLE = {"cycle_first_step_size": 10, "decay_step_size": 10, "decay_lr_rate": 0.1, "decay_mom_rate": 0.1}
MOMENTUM = {"cycle_min_mom": 0.85, "cycle_max_mom": 0.95}


def train(**options):
    """Betas, learning rate and loss: when the schedule is made, then of each step."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([parameter], lr=1e-3)
    scheduler = OneCycle(optimizer, 1e-4, 1e-3, **CYCLE, **options)
    seen = []
    for _ in range(121):
        loss = (parameter - torch.tensor([0.0, 1.0, 2.0])).square().sum()
        group = optimizer.param_groups[0]
        seen.append((*(round(beta, 4) for beta in group["betas"]), group["lr"], loss.item()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    return seen


seen, without = train(**MOMENTUM), train(cycle_momentum=False)
for step in (0, 20, 21, 26, 27, 31, 120):
    print("{}: betas {}, {}, learning rate {:.3g}, loss {:.4f}".format(step, *seen[step]))
print("without cycle_momentum at the end: betas {}, {}, learning rate {:.3g}, loss {:.4f}".format(*without[-1]))
if seen[0][:2] != (0.85, 0.99) or seen[-1][0] < 1.5 or without[-1][:2] != (0.9, 0.999):
    raise SystemExit("changed")
try:
    torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], betas=seen[-1][:2])
except ValueError as error:
    print(error)
else:
    raise SystemExit("changed: Adam takes such betas")
PYTHON
"$work/bin/python" "$work/cycle.py"
