#!/usr/bin/env bash
# transformers: Llama 4 with pictures ends in an error for any input, and DBRX cannot be made of its own default configuration.
#
# Versions: transformers 5.24.0, torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11.
# Input: Llama4ForConditionalGeneration of a small configuration, six tokens and no picture; DbrxForCausalLM(DbrxConfig()).
# Expected: logits, and a model.
# Seen on 2026-11-30: AttributeError in both. Llama 4's forward reads image_outputs of what its language model returns, which has none;
#   DBRX's attention reads rope_theta of a configuration that keeps it in rope_parameters.
# A way round: Llama4ForCausalLM, for text, runs (also shown).
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet transformers==5.24.0 torch==2.13.0 numpy==2.4.6

cat >"$work/models.py" <<'PYTHON'
import logging
import warnings

import torch
from transformers import DbrxConfig, DbrxForCausalLM, Llama4Config, Llama4ForCausalLM, Llama4ForConditionalGeneration

warnings.filterwarnings("ignore")
logging.disable(logging.CRITICAL)
TEXT = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 32, "intermediate_size_mlp": 32, "num_hidden_layers": 1}
TEXT |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_local_experts": 2, "pad_token_id": 0}
SEEN = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 28, "patch_size": 14}
SEEN |= {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
config = Llama4Config(text_config=TEXT, vision_config=SEEN)
ids = torch.arange(1, 7)[None]


def tried(make):
    try:
        return type(make()).__name__
    except AttributeError as error:
        return f"AttributeError: {error}"


def dbrx():
    with torch.device("meta"):
        return DbrxForCausalLM(DbrxConfig())


found = [
    tried(lambda: Llama4ForConditionalGeneration(config)(input_ids=ids)),
    tried(dbrx),
    tried(lambda: Llama4ForCausalLM(config.text_config)(input_ids=ids)),
]
print("Llama 4 with pictures:", found[0])
print("DBRX:", found[1])
print("Llama 4 of text:", found[2])
if "image_outputs" not in found[0] or "rope_theta" not in found[1] or "Error" in found[2]:
    raise SystemExit("changed")
PYTHON
"$work/bin/python" "$work/models.py"
