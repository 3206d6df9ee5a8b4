#!/usr/bin/env bash
# torchao: AdamW with states of 8 bits moves rows that have no gradient in a step by tens of thousands of learning rates; of 4 bits by 1.
#
# Versions: torchao 0.18.0, torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11.
# Input: a parameter [64, 128], 50 steps; each row has a gradient of normal numbers in a tenth of the steps and zeros else, as a row of an
#   embedding has whose token is in some batches; and gradients that grow from 1/1000 to 1 along the columns. Times 1 and times 0.01.
# Expected: Adam's bound: no step of one element is longer than the learning rate by more than a small factor. Fewer bits, larger errors.
# Seen on 2026-11-30, longest step of an element, in learning rates, without a warning:
#                                AdamW   AdamW8bit   AdamWFp8   AdamW4bit
#     rows, gradients of 1         1.0      37,610    175,121         1.0
#     rows, gradients of 0.01      1.0         376      1,751         1.0
#     columns, gradients of 1      1.0       2,566     12,512         1.4
#     all of one size, 1 or 0.01   1.0         1.0        1.1         1.5
#   States are kept in blocks of 256 with one scale. Both moments of a small number beside a large one are rounded, the second, a square, to 0,
#   and the first not: the step is m / eps, which is 1e-8. The 4-bit table of the second moment has no 0. Weights of 150 are left in an
#   embedding table, in a few elements, and the loss shows it only when those tokens come.
# A way round: another optimizer for embeddings; eps of a thousandth of the gradients; states of 4 bits.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet torchao==0.18.0 torch==2.13.0 numpy==2.4.6

cat >"$work/steps.py" <<'PYTHON'
import logging
import warnings

import torch

warnings.simplefilter("ignore")
logging.disable()
import torchao.optim  # noqa: E402

optimizers = {"AdamW": torch.optim.AdamW} | {name: getattr(torchao.optim, name) for name in ("AdamW8bit", "AdamWFp8", "AdamW4bit")}
kinds = {
    "rows": lambda gradient, generator: gradient * (torch.rand(64, 1, generator=generator) < 0.1),
    "columns": lambda gradient, generator: gradient * torch.logspace(-3, 0, 128),
    "all of one size": lambda gradient, generator: gradient,
}


def longest(optimizer, kind, size):
    """The longest step of an element, in learning rates."""
    generator = torch.Generator().manual_seed(1)
    parameter = torch.nn.Parameter(torch.zeros(64, 128))
    optimizer = optimizer([parameter], lr=1e-3, weight_decay=0.0)
    steps = []
    for _ in range(50):
        before = parameter.detach().clone()
        parameter.grad = kinds[kind](torch.randn(64, 128, generator=generator) * size, generator)
        optimizer.step()
        steps.append((parameter.detach() - before).abs().max().item() / 1e-3)
    return max(steps)


seen = {}
for kind in kinds:
    for size in (1.0, 0.01):
        found = seen[kind, size] = {name: longest(optimizer, kind, size) for name, optimizer in optimizers.items()}
        print(f"{kind}, gradients of {size}:", *(f"{name} {step:,.1f}" for name, step in found.items()))
bounded = all(found["AdamW"] < 1.1 and found["AdamW4bit"] < 2 for found in seen.values()) and max(seen["all of one size", 1.0].values()) < 2
far = min(seen["rows", 1.0][name] for name in ("AdamW8bit", "AdamWFp8")) > 1000 and min(seen["columns", 1.0][name] for name in ("AdamW8bit", "AdamWFp8")) > 100
if not bounded or not far:
    raise SystemExit("changed")
PYTHON
"$work/bin/python" "$work/steps.py" 2>"$work/errors" || { tail -3 "$work/errors"; exit 1; }
