#!/usr/bin/env bash
# accelerate: the last step of an epoch is as many times too small as batches are missing from its accumulation.
#
# Versions: accelerate 1.15.0, torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11.
# Input: Accelerator(gradient_accumulation_steps=4) and `with accelerator.accumulate(model)`; 8, 9, 10 and 11 equal batches, SGD. At the end
#   of the loader accelerate steps, whatever is missing (sync_with_dataloader=True, its default).
# Expected: the mean gradient of the batches since the last step, as transformers' Trainer takes it since its #39659: equal steps.
# Seen on 2026-11-30, length of each step, of a step of one batch without accumulation, without a warning:
#     8 batches     1.00 1.00
#     9 batches     1.00 1.00 0.25
#     10 and 11     1.00 1.00 0.50 and 1.00 1.00 0.75
#   backward divides each loss by 4, also where only one batch is left. An epoch of 3 batches or fewer has one step, which is too small each
#   time. Clipping hides it or not, and with Adam the small step is nearly a whole one, while its moments are that of a smaller gradient.
# A way round: a number of batches that 4 divides (drop_last and a sampler), or losses of one's own that are divided by what the window has,
#   times 4.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet accelerate==1.15.0 torch==2.13.0 numpy==2.4.6

cat >"$work/accumulate.py" <<'PYTHON'
import logging
import warnings

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

warnings.simplefilter("ignore")
logging.disable()


def steps(n_batches, accumulated):
    """The length of each step over equal batches of a loss whose gradient is the same everywhere."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
    model = torch.nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(torch.ones(2 * n_batches, 4), batch_size=2))
    found = []
    for batch in batches:
        before = model.weight.detach().clone()
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            found.append((model.weight.detach() - before).norm().item())
    return found


whole = steps(1, 1)[0]
seen = {n: [round(step / whole, 2) for step in steps(n, 4)] for n in (8, 9, 10, 11, 3)}
for n, lengths in seen.items():
    print(f"{n} batches:", *lengths)
if seen != {8: [1.0, 1.0], 9: [1.0, 1.0, 0.25], 10: [1.0, 1.0, 0.5], 11: [1.0, 1.0, 0.75], 3: [0.75]}:
    raise SystemExit("changed")
PYTHON
"$work/bin/python" "$work/accumulate.py"
