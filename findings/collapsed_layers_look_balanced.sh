#!/usr/bin/env bash
# transformers: the router loss of a mixture of experts is that of perfect balance where each layer sends all its tokens to one expert.
#
# Versions: transformers 5.24.0, torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11.
# Input: load_balancing_loss_func of Mixtral, Qwen3-MoE, OLMoE and gpt-oss (34 models have it), with the router's logits of four layers of four
#   experts, one expert for each of 64 tokens: balanced; all layers on expert 0; each layer on an expert of its own.
# Expected: the Switch Transformer's loss, which its documentation names (equations 4 to 6): N * sum(f * P) of a layer, 1 when balanced, up
#   to 4 when one expert has all.
# Seen on 2026-11-30, of four layers, and the mean of the four layers' own losses, by the same function:
#     balanced                             1.0, 1.0
#     all layers on expert 0               3.9, 3.9
#     each layer on an expert of its own   1.0, 3.9; its gradient is 3e-9, that of the mean 6e-3
#   Tokens of all layers are counted together before f and P are multiplied, so that layers make up for one another. What the loss is there to
#   prevent, a layer with one live expert, costs nothing and is not pushed back. With one layer it is the paper's.
#   Users have reported it (transformers' #28255 and #31464, closed).
# A way round: the sum of load_balancing_loss_func((logits,), ...) over outputs.router_logits, divided by their number.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet transformers==5.24.0 torch==2.13.0 numpy==2.4.6

cat >"$work/balance.py" <<'PYTHON'
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import load_balancing_loss_func as gpt_oss
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func as mixtral
from transformers.models.olmoe.modeling_olmoe import load_balancing_loss_func as olmoe
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func as qwen3

TOKENS, EXPERTS = 64, 4


def layer(choice):
    """Logits of a router that sends each token to this expert with a probability of 0.98 or so."""
    return torch.full((TOKENS, EXPERTS), -2.5).scatter(1, choice.expand(TOKENS)[:, None], 2.5).requires_grad_()


cases = {
    "balanced": [layer(torch.arange(TOKENS) % EXPERTS) for _ in range(4)],
    "all on expert 0": [layer(torch.tensor(0)) for _ in range(4)],
    "each on its own": [layer(torch.tensor(i)) for i in range(4)],
}
seen = {}
for name, function in {"Mixtral": mixtral, "Qwen3-MoE": qwen3, "OLMoE": olmoe, "gpt-oss": gpt_oss}.items():
    for case, layers in cases.items():
        together = function(tuple(layers), EXPERTS, 1)
        apart = sum(function((each,), EXPERTS, 1) for each in layers) / 4
        pushes = [torch.cat(torch.autograd.grad(loss, layers)).norm().item() for loss in (together, apart)]
        seen[name, case] = [round(together.item(), 2), round(apart.item(), 2), *pushes]
        print(f"{name}, {case}: together {together.item():.2f}, mean of the layers {apart.item():.2f}; gradients {pushes[0]:.2g} and {pushes[1]:.2g}")
for (_, case), (together, apart, push, must) in seen.items():
    if case == "each on its own":
        if abs(together - 1) > 0.01 or apart < 3.8 or push > 1e-3 * must:
            raise SystemExit("changed")
    elif abs(together - apart) > 0.01 or abs(together - {"balanced": 1, "all on expert 0": 3.9}[case]) > 0.1:
        raise SystemExit("changed")
PYTHON
"$work/bin/python" "$work/balance.py"
