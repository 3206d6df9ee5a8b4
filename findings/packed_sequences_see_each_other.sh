#!/usr/bin/env bash
# transformers: sequences that are packed into one row see each other where use_cache is not False, or where a mask of ones is passed.
#
# Versions: transformers 5.24.0, torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11.
# Input: two sequences of 12 tokens in one row, position_ids 0 to 11 twice, as DataCollatorWithFlattening packs them; models in training mode,
#   attention by sdpa (gpt-oss: eager, the only one here that it has).
# Expected: the second one's logits as it has them alone. masking_utils finds packed sequences by their positions.
# Seen on 2026-11-30, largest difference of the second one's logits, of the largest one, without a warning:
#                               use_cache=False    by default    use_cache=False and a mask of ones
#     Llama, Qwen3, OLMo 2      below 1e-5         1.5 to 1.8    1.5 to 1.8
#     gpt-oss, AFMoE            1.3 to 1.4         the same      the same
#   By default a model makes an empty cache, in training too, and with a cache, or any mask, positions are not looked at: the token after a
#   boundary attends to all before it. gpt-oss and AFMoE do not pass their positions on. Trainer sets use_cache=False, a loop of one's own does
#   not; the loss falls in each. For the mask, see transformers' #46634.
# A way round: use_cache=False and no attention_mask; for gpt-oss flash attention, or a mask with four dimensions.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet transformers==5.24.0 torch==2.13.0 numpy==2.4.6

cat >"$work/packed.py" <<'PYTHON'
import logging
import warnings

import torch
import transformers

warnings.simplefilter("ignore")
logging.disable()
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
sizes |= {"head_dim": 8, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "pad_token_id": 0}
sizes |= {"attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2}


def differences(family):
    """Of the second sequence's logits, with use_cache=False, by default, and with a mask of ones."""
    config = getattr(transformers, f"{family}Config")
    known = config().to_dict()
    torch.manual_seed(0)
    layers = {"layer_types": ["sliding_attention", "full_attention"]} if family in ("GptOss", "Afmoe") else {}
    model = getattr(transformers, f"{family}ForCausalLM")(config(**{key: sizes[key] for key in sizes if key in known}, **layers)).train()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    ids, positions = torch.randint(3, 64, (2, 12)), torch.arange(12).repeat(1, 2)
    must = model(ids[1:], use_cache=False).logits
    ways = {}, {"use_cache": False}, {"use_cache": False, "attention_mask": torch.ones_like(positions)}
    by_default, without, masked = (model(ids.view(1, 24), position_ids=positions, **way).logits[:, 12:] for way in ways)
    return [((found - must).abs().max() / must.abs().max()).item() for found in (without, by_default, masked)]


with torch.no_grad():
    seen = {family: differences(family) for family in ("Llama", "Qwen3", "Olmo2", "GptOss", "Afmoe")}
for family, (without, by_default, masked) in seen.items():
    print(f"{family}: use_cache=False {without:.2g}, by default {by_default:.2g}, with a mask of ones {masked:.2g}")
right = {family: [difference < 1e-4 for difference in found] for family, found in seen.items()}
if right != {**dict.fromkeys(["Llama", "Qwen3", "Olmo2"], [True, False, False]), **dict.fromkeys(["GptOss", "Afmoe"], [False] * 3)}:
    raise SystemExit("changed")
PYTHON
"$work/bin/python" "$work/packed.py"
