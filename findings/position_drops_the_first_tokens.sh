#!/usr/bin/env bash
# Megatron's moe_token_drop_policy="position" keeps the last tokens of a batch on a CPU and leaves the first ones out; a GPU does the reverse.
#
# Versions: megatron-core 0.16.1, the last one for Python 3.11, torch 2.13.0 (a CPU build is enough), numpy 2.4.6.
# Input: apply_router_token_dropping(..., drop_policy="position") of 16, 64 and 1024 tokens, all for the first of two experts, with the capacity
#   for half of them.
# Expected: "tokens at the end of each batch will be dropped", as TransformerConfig has it, on each device, and as a running count does it.
# Seen on 2026-12-01, kept tokens, without a warning:
#     CPU        8 to 15 of 16, 32 to 63 of 64, 512 to 1023 of 1024
#     one H200   the first half: its torch.topk of the same numbers, with torch 2.11.0; Megatron did not run there
#   The tokens of an expert are found by topk of ones and zeros. Which of equal numbers it takes is not defined, and each device has its own answer.
#   A causal model loses the beginning of its sequences, and a rehearsal on a CPU drops other tokens than the training.
# A way round: drop_policy="probs", the default.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet megatron-core==0.16.1 torch==2.13.0 numpy==2.4.6

cat >"$work/position.py" <<'PYTHON'
import torch
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping

first = []
for tokens in (16, 64, 1024):
    torch.manual_seed(0)
    probabilities, routing = torch.zeros(tokens, 2), torch.zeros(tokens, 2, dtype=torch.bool)
    probabilities[:, 0], routing[:, 0] = torch.rand(tokens) * 0.5 + 0.5, True
    _, kept = apply_router_token_dropping(probabilities, routing, 1, 1.0, "position")
    places = kept[:, 0].nonzero().flatten()
    counted = (routing & (routing.cumsum(0) <= tokens // 2))[:, 0].nonzero().flatten()
    print(f"{tokens} tokens: {places.min()} to {places.max()} are kept; by the running count {counted.min()} to {counted.max()}")
    first.append(places.min().item())
if first != [8, 32, 512]:
    raise SystemExit("changed")
PYTHON
PYTHONWARNINGS=ignore "$work/bin/python" "$work/position.py"
