#!/usr/bin/env bash
# peft: a fresh HRA adapter with apply_GS=True changes the model by as much as its outputs: the start at no change is lost.
#
# Versions: peft 0.21.2, transformers 5.24.0, accelerate 1.15.0, torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11.
# Input: linear layers of 64 and 768, fresh adapters with an even r, as the configuration asks, and init_weights=True, its default.
# Expected: the outputs without the adapter, as without apply_GS: the columns are equal in pairs, so that the two reflections of a pair cancel.
# Seen on 2026-11-30, largest difference of the outputs, of the largest one, r=2, 4, 8 and 16:
#     apply_GS=False       below 1e-5
#     apply_GS=True        0.42 to 1.6 (64), 0.30 to 0.47 (768), without a warning; another number with another seed
#   Of two equal columns Gram-Schmidt's second one is 0, and what is normalised in its place is the rounding of a difference. So training starts
#   from a layer that is turned by chance, and with a gradient of 1e3 to 5e6 in place of 1e-4 to 0.03.
# A way round: apply_GS=False.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet peft==0.21.2 transformers==5.24.0 accelerate==1.15.0 torch==2.13.0 numpy==2.4.6

cat >"$work/reflections.py" <<'PYTHON'
import logging
import warnings

import peft
import torch

warnings.simplefilter("ignore")
logging.disable()


def differences(width, rank):
    """Of a fresh adapter's outputs without and with Gram-Schmidt, and the largest gradient of each."""
    found = []
    for orthogonal in (False, True):
        torch.manual_seed(0)
        x, layer = torch.randn(8, width), torch.nn.Sequential(torch.nn.Linear(width, width))
        must = layer(x).detach()
        model = peft.get_peft_model(layer, peft.HRAConfig(target_modules=["0"], r=rank, apply_GS=orthogonal))
        y = model(x)
        y.square().mean().backward()
        (parameter,) = [parameter for parameter in model.parameters() if parameter.requires_grad]
        found.append((((y - must).abs().max() / must.abs().max()).item(), parameter.grad.abs().max().item()))
    return found


seen = {(width, rank): differences(width, rank) for width in (64, 768) for rank in (2, 4, 8, 16)}
for (width, rank), ((without, small), (orthogonal, large)) in seen.items():
    print(f"width {width}, r={rank}: difference {without:.2g}, with apply_GS {orthogonal:.2g}; largest gradient {small:.2g} and {large:.2g}")
if any(without > 1e-4 or orthogonal < 0.1 for (without, _), (orthogonal, _) in seen.values()):
    raise SystemExit("changed")
PYTHON
"$work/bin/python" "$work/reflections.py"
