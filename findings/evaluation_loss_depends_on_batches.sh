#!/usr/bin/env bash
# transformers' Trainer: eval_loss of one model and one data set depends on the size of the batches; the training loss does not.
#
# Versions: transformers 5.24.0, accelerate 1.15.0, torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11.
# Input: a small Llama and six sequences with 2 to 16 labels that count, as answers have; evaluated in batches of 1 to 6, one at a time, and
#   one training step with the learning rate 0, in batches of 1 to 6 that are accumulated to all six sequences.
# Expected: one loss, the mean over tokens: Trainer divides a step's loss by the number of its tokens, whatever its batches are.
# Seen on 2026-11-30, batches of 1, 2, 3 and 6:
#     eval_loss        4.356, 4.732, 4.581, 4.555
#     training loss    4.555, 4.555, 4.555, 4.555
#   Each batch's mean over its tokens counts as often as the batch has sequences, so that a token of a short answer counts up to 8 times as much
#   as one of a long answer beside it. exp(eval_loss) is no perplexity, and early stopping and the best checkpoint depend on the batch size.
# A way round: one batch of the whole set, or compute_metrics with sums over tokens.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet transformers==5.24.0 accelerate==1.15.0 torch==2.13.0 numpy==2.4.6

cat >"$work/evaluation.py" <<'PYTHON'
import logging
import sys
import tempfile
import warnings

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

warnings.simplefilter("ignore")
logging.disable()
torch.manual_seed(3)
sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}
model = LlamaForCausalLM(LlamaConfig(**sizes))
with torch.no_grad():
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(10)
data = []
for n_labels in (16, 3, 2, 9, 2, 3):
    ids = torch.randint(3, 64, (16,))
    data.append({"input_ids": ids, "labels": ids.masked_fill(torch.arange(16) >= n_labels, -100)})


def losses(size):
    """eval_loss in batches of this size, and the training loss of one step over all sequences in such batches."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, "max_steps": 1}
        options |= {"per_device_eval_batch_size": size, "per_device_train_batch_size": size, "learning_rate": 0.0}
        arguments = TrainingArguments(folder, gradient_accumulation_steps=len(data) // size, **options)
        trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data)
        of_evaluation = trainer.evaluate()["eval_loss"]
        trainer.train()
        (of_training,) = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return round(of_evaluation, 3), round(of_training, 3)


stdout, sys.stdout = sys.stdout, sys.stderr  # Trainer prints its records
seen = {size: losses(size) for size in (1, 2, 3, 6)}
sys.stdout = stdout
for size, (of_evaluation, of_training) in seen.items():
    print(f"batches of {size}: eval_loss {of_evaluation}, training loss {of_training}")
of_evaluation, of_training = zip(*seen.values())
if max(of_training) - min(of_training) > 0.002 or max(of_evaluation) - min(of_evaluation) < 0.05:
    raise SystemExit("changed")
PYTHON
"$work/bin/python" "$work/evaluation.py" 2>"$work/errors" || { tail -3 "$work/errors"; exit 1; }
