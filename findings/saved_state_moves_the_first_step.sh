#!/usr/bin/env bash
# torch.distributed.checkpoint: reading the state of an optimizer that has made no step yet is a step: Adam's first one is then 0.74 of its length.
#
# Versions: torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11.
# Input: one step with a gradient of 1, lr=0.1, without and with get_optimizer_state_dict(model, optimizer) before it, as a checkpoint of step 0
#   and a resume that loads in place have it.
# Expected: a function that returns a state changes none.
# Seen on 2026-12-01, the first step, without and with it, without a warning:
#     AdamW                                0.1000 and 0.0744
#     Adam with weight_decay=0.1           0.1000 and 0.0802: the decay of weights of 1 is in its moments before any gradient
#     SGD, momentum=0.9, weight_decay=0.1  0.1100 and 0.1190, for the same reason
#   It makes the state by a step with gradients of 0 and lr=0, which moves no weight, but counts: the first bias correction is the second one's.
#   A training that is resumed from step 0 differs from the one that was saved, and one that saves from one that does not.
#   Reported as PyTorch's #164929 (open); torchtitan takes the count back (#4382).
# A way round: no state dict before the first step; else optimizer.state.clear() behind it.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6

cat >"$work/first.py" <<'PYTHON'
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


def first_step(make, look, clear=False):
    model = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = make(model.parameters())
    if look:
        get_optimizer_state_dict(model, optimizer)
    if clear:
        optimizer.state.clear()
    model.weight.grad = torch.ones(2, 2)
    optimizer.step()
    return round(1 - model.weight[0, 0].item(), 4)


optimizers = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.0),
    "Adam with weight decay": lambda parameters: torch.optim.Adam(parameters, lr=0.1, weight_decay=0.1),
    "SGD with momentum and weight decay": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
}
seen = {name: (first_step(make, False), first_step(make, True), first_step(make, True, True)) for name, make in optimizers.items()}
for name, (without, after, cleared) in seen.items():
    print(f"{name}: first step {without}, after its state was read {after}, and cleared {cleared}")
if any(without == after or without != cleared for without, after, cleared in seen.values()) or seen["AdamW"][:2] != (0.1, 0.0744):
    raise SystemExit("changed")
PYTHON
"$work/bin/python" "$work/first.py"
