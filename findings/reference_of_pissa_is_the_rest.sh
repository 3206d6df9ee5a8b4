#!/usr/bin/env bash
# trl: DPO of a PiSSA or OLoRA adapter is held to a reference that nobody trained: what is left of the weights without the adapter.
#
# Versions: trl 1.16.0, peft 0.21.2, transformers 5.24.0, accelerate 1.15.0, torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11.
# Input: DPOTrainer with peft_config and no ref_model, a small Llama with random weights, one step with the learning rate 0.
# Expected: a loss of log(2) = 0.6931 and rewards of 0 at the first step, whatever the policy is: it is its own reference.
# Seen on 2026-11-30, loss and the reward of what was chosen, without an error or a warning:
#     init_lora_weights=True, "gaussian", "orthogonal"    0.6931, 0.0000
#     "pissa"                                             0.5797, 0.0327
#     "olora"                                             0.6625, -0.0145
#   These two take the adapter out of the base weights at the start. The reference is the model with its adapter disabled, as it is for GRPO,
#   RLOO and KTO, and that is the rest, whose text makes no sense. The KL penalty pulls to it. That the base weights change is known (peft's #2184).
# A way round: ref_model, a second copy of the model.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet trl==1.16.0 peft==0.21.2 transformers==5.24.0 accelerate==1.15.0 torch==2.13.0 numpy==2.4.6

cat >"$work/reference.py" <<'PYTHON'
import logging
import sys
import tempfile
import warnings

import peft
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

warnings.simplefilter("ignore")
logging.disable()
words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", bos_token="w1", eos_token="w2")
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}


def text(n):
    return "".join(f"w{i} " for i in torch.randint(3, 64, (n,)).tolist())


torch.manual_seed(0)
data = Dataset.from_list([{"prompt": text(4), "chosen": text(6), "rejected": text(6)} for _ in range(4)])


def first_step(init):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(10)
    with tempfile.TemporaryDirectory() as folder:
        options = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, "max_steps": 1}
        arguments = DPOConfig(folder, learning_rate=0.0, per_device_train_batch_size=4, bf16=False, **options)
        lora = peft.LoraConfig(init_lora_weights=init, target_modules="all-linear")
        trainer = DPOTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer, peft_config=lora)
        trainer.train()
        return trainer.state.log_history[0]["loss"], trainer.state.log_history[0]["rewards/chosen"]


stdout, sys.stdout = sys.stdout, sys.stderr  # the trainer prints its records
seen = {init: first_step(init) for init in (True, "gaussian", "orthogonal", "pissa", "olora")}
sys.stdout = stdout
for init, (loss, reward) in seen.items():
    print(f"{init}: loss {loss:.4f}, reward of what was chosen {reward:.4f}")
if {init: abs(loss - 0.6931) < 1e-3 for init, (loss, _) in seen.items()} != {True: True, "gaussian": True, "orthogonal": True, "pissa": False, "olora": False}:
    raise SystemExit("changed")
PYTHON
"$work/bin/python" "$work/reference.py" 2>"$work/errors" || { tail -3 "$work/errors"; exit 1; }
