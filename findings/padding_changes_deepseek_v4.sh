#!/usr/bin/env bash
# transformers: what DeepSeek V4 generates for a prompt depends on the padding in front of it, that is on the other prompts of its batch.
#
# Versions: transformers 5.24.0, torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11.
# Input: small configurations with random weights, with each kind of layer; a prompt of 10 tokens (140 for the kind that joins 128 tokens),
#   alone and with 1, 4 and 128 tokens of padding in front, which attention_mask marks and position_ids leave out.
# Expected: the same logits, as of its layers with a sliding window and of DeepSeek V3; left padding is what generate() asks for in a batch.
# Seen on 2026-11-30, largest difference of logits, of the largest one, without a warning:
#     compressed_sparse_attention     0.59, 0.93, 0.93
#     heavily_compressed_attention    0.009, 0.019, 0.082
#     sliding_attention, V3, and padding behind the prompt: below 1e-5
#   A compressed layer joins every 4 or 128 tokens of the batch into one, padding included: the mask does not reach it, and the groups begin
#   with the padding. Greedy search then generates other tokens, and evaluations in batches differ from those one by one. Users have
#   reported it (transformers' #45938).
# A way round: prompts of one length in a batch, or one at a time.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet transformers==5.24.0 torch==2.13.0 numpy==2.4.6

cat >"$work/padding.py" <<'PYTHON'
import logging
import warnings

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DeepseekV4Config, DeepseekV4ForCausalLM

warnings.simplefilter("ignore")
logging.disable()
sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
sizes |= {"vocab_size": 64, "q_lora_rank": 16, "qk_rope_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0}
of_v3 = {"num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1, "topk_group": 1}
of_v4 = {"num_key_value_heads": 1, "head_dim": 16, "o_lora_rank": 16, "index_head_dim": 16, "index_n_heads": 2}


def differences(model, length):
    """Of a prompt behind padding to the same one alone; and of one with padding behind it."""
    torch.manual_seed(0)
    for parameter in model.eval().parameters():
        if parameter.dim() > 1:
            parameter.copy_(torch.randn_like(parameter) * 0.15)
    ids = torch.randint(3, 64, (1, length))
    alone, seen = model(ids).logits, []
    for before, behind in ((1, 0), (4, 0), (128, 0), (0, 4)):
        padded = torch.nn.functional.pad(ids, (before, behind))
        mask = torch.nn.functional.pad(torch.ones_like(ids), (before, behind))
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        found = model(padded, attention_mask=mask, position_ids=positions).logits[:, before : before + length]
        seen.append(round(((found - alone).abs().max() / alone.abs().max()).item(), 3))
    return seen


torch.manual_seed(0)
seen = {}
with torch.no_grad():
    for kind in ("compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"):
        model = DeepseekV4ForCausalLM(DeepseekV4Config(**sizes, **of_v4, layer_types=[kind] * 2))
        seen[kind] = differences(model, 140 if kind.startswith("heavily") else 10)
    seen["DeepSeek V3"] = differences(DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **of_v3)), 10)
for kind, found in seen.items():
    print(f"{kind}: 1, 4, 128 in front, 4 behind:", *found)
compressed = list(seen)[:2]
if any(min(seen[kind][:3]) < 0.004 or seen[kind][3] for kind in compressed) or any(any(seen[kind]) for kind in list(seen)[2:]):
    raise SystemExit("changed")
PYTHON
"$work/bin/python" "$work/padding.py"
