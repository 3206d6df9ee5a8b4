#!/usr/bin/env bash
# transformers' Trainer: T5, BART, NLLB and XLNet get gradients as many times too large as it accumulates batches.
#
# Versions: transformers 5.24.0, accelerate 1.15.0, torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11.
# Input: one step of SGD over four sequences without padding: one batch of four, and four accumulated batches of one.
# Expected: one change of the weights. Llama's are equal.
# Seen on 2026-11-30: T5, MT5, BART, M2M100 (NLLB's class) and XLNet change 4 times as much when 4 batches are accumulated.
#   Trainer gives a model whose forward takes **kwargs the number of labels in the whole step, num_items_in_batch, and leaves the division to
#   it. These forwards take **kwargs, but call CrossEntropyLoss themselves, over their own batch's mean. Nothing warns.
# A way round: model.accepts_loss_kwargs = False before Trainer is made: Trainer divides by the number of batches again (also shown).
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet transformers==5.24.0 accelerate==1.15.0 torch==2.13.0 numpy==2.4.6

cat >"$work/accumulated.py" <<'PYTHON'
import logging
import sys
import tempfile
import warnings

import torch
import transformers

warnings.filterwarnings("ignore")
logging.disable(logging.CRITICAL)
WORDS = 96
COMMON = {"vocab_size": WORDS, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
T5 = {**COMMON, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
BART = {**COMMON, "d_model": 32, "dropout": 0.0, "max_position_embeddings": 32}
for side in ("encoder", "decoder"):
    BART |= {f"{side}_layers": 1, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 32, f"{side}_layerdrop": 0.0}
LLAMA = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
XLNET = {"vocab_size": WORDS, "d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 32, "dropout": 0.0}
MODELS = {
    "LlamaForCausalLM": ("LlamaConfig", LLAMA, 1),
    "T5ForConditionalGeneration": ("T5Config", T5, 4),
    "MT5ForConditionalGeneration": ("MT5Config", T5, 4),
    "BartForConditionalGeneration": ("BartConfig", BART, 4),
    "M2M100ForConditionalGeneration": ("M2M100Config", BART, 4),
    "XLNetLMHeadModel": ("XLNetConfig", XLNET, 4),
}


def change(name, batch, accumulated, way_round):
    config, sizes, _ = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config)(**sizes))
    if way_round:
        model.accepts_loss_kwargs = False
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(3, WORDS, (4, 2, 8), generator=generator)
    data = [{"input_ids": ids, "labels": labels} for ids, labels in rows]
    before = [each.detach().clone() for each in model.parameters()]
    with tempfile.TemporaryDirectory() as folder:
        given = {"max_steps": 1, "learning_rate": 1e-2, "optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0}
        quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "seed": 0, "save_strategy": "no"}
        sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulated}
        transformers.Trainer(model, transformers.TrainingArguments(folder, **sizes, **given, **quiet), train_dataset=data).train()
    return torch.cat([(one - other).flatten() for one, other in zip(before, model.parameters())])


seen = []
for name, (_, _, times) in MODELS.items():
    at_once = change(name, 4, 1, False)
    found = [(change(name, 1, 4, way).norm() / at_once.norm()).item() for way in (False, True)]
    print(f"{name}: 4 batches of 1 change the weights {found[0]:.4f} times as much as 1 batch of 4; with the way round {found[1]:.4f}", file=sys.stderr)
    seen.append(abs(found[0] - times) < 1e-3 and abs(found[1] - 1) < 1e-3)
if not all(seen):
    raise SystemExit("changed")
PYTHON
"$work/bin/python" "$work/accumulated.py" 2>&1 | grep "ForC\|XLNet\|changed\|Error"
