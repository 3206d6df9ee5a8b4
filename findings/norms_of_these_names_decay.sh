#!/usr/bin/env bash
# transformers' Trainer decays the weights of norms that are called norm_f, norm1 or norm_ffn, which it says it leaves out.
#
# Versions: transformers 5.24.0, accelerate 1.15.0, torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11.
# Input: small models of seven classes for causal language models, Trainer with weight_decay=0.1, and the groups of its optimizer.
# Expected: no norm in the group that decays: get_decay_parameter_names says that it leaves out names with a "variation of 'norm'".
# Seen on 2026-12-01, norms that decay, without a warning:
#     Mamba, Mamba2, FalconMamba, NemotronH   the last one, norm_f
#     xLSTM                                   norm_mlstm and norm_ffn of each block
#     HyperCLOVAX                             post_norm1 and post_norm2 of each layer
#     Llama                                   none
#   A norm is known by torch's class LayerNorm or by its name: "layernorm", "rmsnorm", or "norm" as a whole word or after "_". No model's own RMSNorm
#   is that class. Such a weight, which is 1 at the start, is drawn to 0, and the size of all logits with it. Vectors of other names decay as well:
#   Mamba's A_log and D, GPT-OSS's sinks, the queries of attention residuals (Inkling 2).
# A way round: Trainer's create_optimizer or get_decay_parameter_names of one's own: parameters with two dimensions and more.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet transformers==5.24.0 accelerate==1.15.0 torch==2.13.0 numpy==2.4.6

cat >"$work/norms.py" <<'PYTHON'
import logging
import sys
import warnings

import transformers
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

warnings.simplefilter("ignore")
logging.disable()
transformers.logging.set_verbosity_error()
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 32}
MAMBA2 = {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 4}
NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1, "ssm_state_size": 4, "layers_block_type": ["mamba", "attention"]}
options = {
    "mamba": {"state_size": 4},
    "mamba2": MAMBA2,
    "falcon_mamba": {"state_size": 4},
    "nemotron_h": {**ATTENTION, **NEMOTRON},
    "xlstm": {"num_heads": 4, "num_blocks": 2},
    "hyperclovax": ATTENTION,
    "llama": ATTENTION,
}


def decayed(name):
    """Names of the norms whose weights are in a group with weight decay."""
    config = AutoConfig.for_model(name, hidden_size=32, num_hidden_layers=2, vocab_size=40, **options[name])
    model = AutoModelForCausalLM.from_config(config)
    arguments = TrainingArguments(sys.argv[1], weight_decay=0.1, use_cpu=True, report_to="none")
    optimizer = Trainer(model, arguments).create_optimizer()
    decays = {id(parameter) for group in optimizer.param_groups if group["weight_decay"] for parameter in group["params"]}
    norms = [(path, module.weight) for path, module in model.named_modules() if type(module).__name__.endswith("Norm")]
    return sorted({path.split(".")[-1] for path, weight in norms if id(weight) in decays})


seen = {name: decayed(name) for name in options}
for name, norms in seen.items():
    print(f"{name}: {' '.join(norms) or 'none'}")
must = {name: ["norm_f"] for name in ("mamba", "mamba2", "falcon_mamba", "nemotron_h")}
if seen != must | {"xlstm": ["norm_ffn", "norm_mlstm"], "hyperclovax": ["post_norm1", "post_norm2"], "llama": []}:
    raise SystemExit("changed")
PYTHON
"$work/bin/python" "$work/norms.py" "$work/out"
