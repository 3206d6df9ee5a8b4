#!/usr/bin/env bash
# Liger's cross entropies: a second backward of the same loss is scaled twice, and changes the gradient that the first one returned.
#
# Versions: liger-kernel 0.8.5, triton 3.9.0 (its interpreter), torch 2.13.0 (a CPU build is enough), numpy 2.4.6, packaging 26.4 (which it
#   imports and does not ask for), Python 3.11.
# Input: loss = 3 * cross_entropy(logits); loss.backward(retain_graph=True) twice, with LigerCrossEntropyFunction and with
#   liger_fused_linear_cross_entropy.
# Expected: two equal gradients, together twice the gradient; or an error, as torch's chunked linear_cross_entropy raises.
# Seen on 2026-11-30: together 4 times the gradient: the second one is 3 times too large. With a factor of 1 it is right.
#     cross entropy: first gradient 1.0, second 3.0, the first one's tensor after the second call: 3.0
#     fused linear cross entropy, two backward passes together: 4.0 (hidden states), 4.0 (weight)
#   The forward pass writes the gradient over the logits, and backward multiplies that tensor in place by the gradient of the loss. Each
#   call multiplies again. It is met where a loss is differentiated per task (weighting by gradient norms), or twice for a penalty.
# A way round: one backward pass for each forward pass.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet triton==3.9.0 torch==2.13.0 numpy==2.4.6 packaging==26.4
"$work/bin/pip" install --quiet --no-deps liger-kernel==0.8.5

cat >"$work/twice.py" <<'PYTHON'
import torch
import torch.nn.functional as F
from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

torch.manual_seed(0)
target = torch.tensor([1, 2, 3, 4])


def times(gradient, must):
    """How many times the right gradient it is."""
    return round((gradient / must).median().item(), 3)


leaf = torch.randn(4, 8, requires_grad=True)
must = torch.autograd.grad(3 * F.cross_entropy(leaf, target), leaf)[0]
logits = leaf * 1.0
loss = 3 * LigerCrossEntropyFunction.apply(logits, target, None, -100, 0.0, 0.0, "mean", None, False)[0]
first = torch.autograd.grad(loss, logits, retain_graph=True)[0]
before = times(first, must)
second = torch.autograd.grad(loss, logits)[0]
seen = [before, times(second, must), times(first, must)]
print("cross entropy: first, second, first after the second:", seen)

hidden, weight = torch.randn(4, 16, requires_grad=True), torch.randn(8, 16, requires_grad=True)
must = torch.autograd.grad(3 * F.cross_entropy(hidden @ weight.T, target), (hidden, weight))
loss = 3 * liger_fused_linear_cross_entropy(hidden, weight, target)
loss.backward(retain_graph=True)
loss.backward()
seen += [times(hidden.grad, must[0]), times(weight.grad, must[1])]
print("fused linear cross entropy, both together: hidden states, weight:", seen[3:])
if seen != [1.0, 3.0, 3.0, 4.0, 4.0]:
    raise SystemExit("changed")
PYTHON
TRITON_INTERPRET=1 "$work/bin/python" "$work/twice.py"
