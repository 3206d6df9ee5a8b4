#!/usr/bin/env bash
# A group of parameters that is added to an optimizer under LinearLR ends with 1 / start_factor times its learning rate: a thousand times, often.
#
# Versions: torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11.
# Input: SGD with lr=0.1; a scheduler; add_param_group with lr=0.1, before the first step and in the middle of ten; twenty steps.
# Expected: 0.1 for both groups behind the warmup, or an error, as LambdaLR, OneCycleLR, CyclicLR and CosineAnnealingWarmRestarts raise one.
#   add_param_group is documented as the way to make frozen layers trainable while training progresses.
# Seen on 2026-12-01, the learning rate at the end, without an error or a warning:
#     first group                                      0.1
#     second, added at once, start_factor=0.001        100
#     second, added after 5 of 10 steps                0.2
#     ConstantLR, factor=0.01, added at once           10
#   Each step multiplies the rate that is there, so that the factors of the whole warmup are 1 / start_factor. The constructor alone sets a group
#   to its start, and the new group has not seen it. SequentialLR with a warmup in front does so until its milestone, where it raises.
# A way round: the rate that the other groups have at that moment, scheduler.get_last_lr()[0] (also shown); or a new scheduler.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6

cat >"$work/groups.py" <<'PYTHON'
import torch
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingWarmRestarts, CyclicLR, LambdaLR, LinearLR, OneCycleLR, SequentialLR

LR = 0.1


def rates(make, added_after=0, lr_of=lambda scheduler: LR):
    """Learning rates of both groups after 20 steps."""
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.SGD([first], lr=LR, momentum=0.9)
    scheduler = make(optimizer)
    for step in range(20):
        if step == added_after:
            optimizer.add_param_group({"params": [second], "lr": lr_of(scheduler)})
        optimizer.step()
        scheduler.step()
    return [round(group["lr"], 4) for group in optimizer.param_groups]


def linear(optimizer):
    return LinearLR(optimizer, start_factor=0.001, total_iters=10)


seen = {
    "LinearLR, added at once": rates(linear),
    "LinearLR, added after 5": rates(linear, 5),
    "ConstantLR, added at once": rates(lambda optimizer: ConstantLR(optimizer, factor=0.01)),
    "LinearLR, added after 5 with its share": rates(linear, 5, lambda scheduler: scheduler.get_last_lr()[0]),
}
for name, found in seen.items():
    print(f"{name}: {found}")
others = {
    "SequentialLR": lambda optimizer: SequentialLR(optimizer, [linear(optimizer), ConstantLR(optimizer, factor=1.0)], milestones=[15]),
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda step: 1.0),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, LR, total_steps=30),
    "CyclicLR": lambda optimizer: CyclicLR(optimizer, LR / 10, LR),
    "CosineAnnealingWarmRestarts": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 5),
}
for name, make in others.items():
    try:
        raise SystemExit(f"changed: {name} {rates(make)}")
    except (ValueError, KeyError) as error:
        print(f"{name}: {type(error).__name__}")
SECOND = (100.0, 0.2, 10.0, 0.1)
if [found[0] for found in seen.values()] != [LR] * 4 or any(abs(found[1] / must - 1) > 0.01 for found, must in zip(seen.values(), SECOND)):
    raise SystemExit("changed")
PYTHON
"$work/bin/python" "$work/groups.py"
