#!/usr/bin/env bash
# DeepSpeed's mixture of experts draws lots in evaluation too: the second expert with k=2, and with k=1 the tokens that are left out.
#
# Versions: deepspeed 0.19.8, torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11.
# Input: TopKGate(8, 4, k=k, min_capacity=0).eval(), its other options as they are, twice with the same 64 tokens.
# Expected: one result, as noisy_gate_policy is left out in evaluation, and as k=3 has it; with k=2 the two largest gates.
# Seen on 2026-12-01, tokens of 64 that go elsewhere the second time, without a warning:
#     k=1  2 to 16, in ten trials: they are left out the one time and not the other
#     k=2  33 to 49; and for 26 to 38 the second expert is not the one with the second largest gate
#     k=3  none
#     k=1 with use_rts=False, k=2 with top2_2nd_expert_sampling=False: none
#   Both options are True by default and are asked whether the model trains or not. The loss of an evaluation differs from run to run, and
#   what is measured is not the model that a server with the two largest gates runs.
# A way round: use_rts=False, top2_2nd_expert_sampling=False for evaluation, as attributes of each TopKGate.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 setuptools==80.9.0 wheel==0.45.1
DS_BUILD_OPS=0 "$work/bin/pip" install --quiet --no-build-isolation deepspeed==0.19.8

cat >"$work/gate.py" <<'PYTHON'
import torch
from deepspeed.moe.sharded_moe import TopKGate


def differs(seed, k, **options):
    """Tokens that go elsewhere the second time, and tokens whose second expert has not the second largest gate."""
    torch.manual_seed(seed)
    gate, tokens = TopKGate(8, 4, k=k, min_capacity=0, **options).eval(), torch.randn(64, 8)
    with torch.no_grad():
        # [token, expert] of the results [token, expert, place]
        first, second = ((gate(tokens)[1] > 0).any(2) for _ in range(2))
        largest = torch.zeros_like(first).scatter_(1, gate.wg(tokens).topk(k).indices, True)
    return (first != second).any(1).sum().item(), (first & ~largest).any(1).sum().item()


cases = {
    "k=1": (1, {}),
    "k=2": (2, {}),
    "k=3": (3, {}),
    "k=1, use_rts=False": (1, {"use_rts": False}),
    "k=2, top2_2nd_expert_sampling=False": (2, {"top2_2nd_expert_sampling": False}),
}
seen = {name: [differs(seed, k, **options) for seed in range(10)] for name, (k, options) in cases.items()}
for name, counts in seen.items():
    elsewhere, other = zip(*counts)
    print(f"{name}: {min(elsewhere)} to {max(elsewhere)} of 64 go elsewhere the second time,")
    print(f"    {min(other)} to {max(other)} to an expert that is not one of the k with the largest gates")
if max(seen["k=1"])[0] < 8 or min(seen["k=2"])[0] < 20 or any(max(seen[name]) != (0, 0) for name in list(cases)[2:]):
    raise SystemExit("changed")
PYTHON
"$work/bin/python" "$work/gate.py"
