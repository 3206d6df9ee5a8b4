#!/usr/bin/env bash
# Liger's distillation returns its soft and hard loss beside the sum; both require gradients, and the gradient of both is zero.
#
# Versions: liger-kernel 0.8.5, triton 3.9.0, torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11.
# Input: LigerFusedLinearJSDLoss(return_soft_hard_loss=True), six tokens, and a mixture that the user weighs: 0.5 * soft + 0.5 * hard, which is
#   what the first result is by default. LigerFusedLinearCosineSimilarityLoss has the same option.
# Expected: the gradients of the first result; or results that require none, so that backward raises.
# Seen on 2026-12-01, loss and norms of the gradients of hidden states and weight, without an error or a warning:
#     loss                      2.019; 0.624, 0.677
#     0.5 * soft + 0.5 * hard   2.019; 0, 0
#   backward takes the gradient of the first result alone. A schedule that moves from the hard to the soft loss, or a logged loss that is added
#   to another one, trains nothing.
# A way round: weight_hard_loss and weight_soft_loss of the module, which may be set before each call.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet liger-kernel==0.8.5 triton==3.9.0 torch==2.13.0 numpy==2.4.6

cat >"$work/distil.py" <<'PYTHON'
import torch
from liger_kernel.chunked_loss import LigerFusedLinearCosineSimilarityLoss, LigerFusedLinearJSDLoss


def gradients(module, mixture):
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(10, 8, requires_grad=True)
    teacher, teacher_weight, labels = torch.randn(6, 8), torch.randn(10, 8), torch.randint(0, 10, (6,))
    loss, soft, hard = module(compiled=False, return_soft_hard_loss=True)(hidden, weight, teacher, teacher_weight, labels)
    if not (soft.requires_grad and hard.requires_grad):
        raise SystemExit("changed: they require no gradient")
    chosen = 0.5 * soft + 0.5 * hard if mixture else loss
    chosen.backward()
    return [round(number.item(), 4) for number in (chosen, hidden.grad.norm(), weight.grad.norm())]


for module in (LigerFusedLinearJSDLoss, LigerFusedLinearCosineSimilarityLoss):
    whole, mixture = gradients(module, False), gradients(module, True)
    print(f"{module.__name__}: the loss and its gradients {whole}, the same mixture by hand {mixture}")
    if abs(whole[0] - mixture[0]) > 1e-3 or min(whole[1:]) < 0.1 or mixture[1:] != [0.0, 0.0]:
        raise SystemExit("changed")
PYTHON
"$work/bin/python" "$work/distil.py"
