#!/usr/bin/env bash
# Megatron's cross entropy writes into the logits that it is given, where they are float32: what reads them next reads probabilities.
#
# Versions: megatron-core 0.16.1, the last one for Python 3.11, torch 2.13.0 (a CPU build is enough), numpy 2.4.6; the main branch, read in a
#   stored copy of late 2026, has the same lines.
# Input: vocab_parallel_cross_entropy of logits [4, 1, 6] and targets, one rank; then a z-loss, 0.1 * logsumexp(logits)^2, of the same logits.
# Expected: logits as they were; the z-loss and gradients of F.cross_entropy in float64.
# Seen on 2026-12-01, without an error or a warning, also by fused_vocab_parallel_cross_entropy:
#     float32 logits behind the call       each row sums to 1, behind backward to 0: its gradient
#     z-loss before and behind the call    0.502 and 0.389; gradients differ by 0.053, the largest being 0.240
#     bfloat16 logits                      as they were
#   .float() copies bfloat16 and hands float32 on; the subtraction of the maximum, exp and the division are done in place. Heads whose logits are
#   kept in float32 are the ones that a z-loss, an entropy or a distillation beside the loss is for. A repair waits as Megatron-LM's #1594.
# A way round: logits.clone() for the loss, or all else before it.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet megatron-core==0.16.1 torch==2.13.0 numpy==2.4.6

cat >"$work/logits.py" <<'PYTHON'
import os

import torch
import torch.nn.functional as F

os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
torch.distributed.init_process_group("gloo", rank=0, world_size=1)

from megatron.core import parallel_state  # noqa: E402
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy  # noqa: E402
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy  # noqa: E402

parallel_state.initialize_model_parallel()
torch.manual_seed(0)
values, target = torch.randn(4, 1, 6), torch.randint(0, 6, (4, 1))


def z_loss(logits):
    return 0.1 * torch.logsumexp(logits, -1).square().mean()


def fused(logits, target):
    return fused_vocab_parallel_cross_entropy(logits, target, parallel_state.get_tensor_model_parallel_group())


for name, loss_of in {"vocab_parallel_cross_entropy": vocab_parallel_cross_entropy, "fused": fused}.items():
    hidden = values.clone().requires_grad_()
    logits = hidden * 1.0
    loss = loss_of(logits, target).mean()
    sums, behind = logits.detach().sum(-1).flatten(), z_loss(logits)
    (loss + behind).backward()
    exact = values.double().requires_grad_()
    before = z_loss(exact)
    (F.cross_entropy(exact[:, 0], target[:, 0]) + before).backward()
    far = (hidden.grad - exact.grad).abs().max().item()
    rounded = values.bfloat16()
    loss_of(rounded, target)
    kept = torch.equal(rounded, values.bfloat16())
    print(f"{name}: loss {loss.item():.4f}, rows sum to {sums.tolist()}; z-loss {before.item():.3f} before, {behind.item():.3f} behind;")
    print(f"    gradients differ by {far:.3f} of {exact.grad.abs().max().item():.3f}; bfloat16 logits kept: {kept}")
    if (sums - 1).abs().max() > 1e-5 or behind.item() > 0.9 * before.item() or far < 0.01 or not kept:
        raise SystemExit("changed")
torch.distributed.destroy_process_group()
PYTHON
PYTHONWARNINGS=ignore "$work/bin/python" "$work/logits.py"
