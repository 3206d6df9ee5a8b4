#!/usr/bin/env bash
# transformers' Trainer: with label_smoothing_factor, vision-language models learn to copy their input: the smoothed loss has no shift.
#
# Versions: transformers 5.24.0, accelerate 1.15.0, torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11.
# Input: text without pictures, labels that are input_ids, random tokens; the first step's loss with label_smoothing_factor=1e-6, which is
#   none, and with 0.
# Expected: one loss, as of LlamaForCausalLM. Qwen2.5-VL, Llava and Mistral 3 are decoders like Llama, and shift labels themselves.
# Seen on 2026-11-30, loss with 0 and with 1e-6, and the cross entropy of each position's logits and its own token, without a warning:
#     Llama            24.85, 24.85
#     Qwen2.5-VL       30.08, 24.80, own tokens 24.80
#     Llava, Mistral 3 26.33, 30.23 and 25.64, 30.94; own tokens 27.71 and 28.36: 12/11 of it, as the sum is divided by the shifted labels
#   Trainer shifts labels for classes that the list of causal language models names, and these are not in it: their names end with
#   ForConditionalGeneration. The loss falls quickly, and what is generated repeats the last token.
# A way round: compute_loss_func=lambda outputs, labels, num_items_in_batch: with F.cross_entropy's label_smoothing and a shift.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet transformers==5.24.0 accelerate==1.15.0 torch==2.13.0 numpy==2.4.6

cat >"$work/smoothing.py" <<'PYTHON'
import logging
import sys
import tempfile
import warnings

import torch
import torch.nn.functional as F
import transformers
from transformers import CLIPVisionConfig, LlamaConfig, MistralConfig, PixtralVisionConfig

warnings.simplefilter("ignore")
logging.disable()
text = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
sight = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 16}
configs = {
    "LlamaForCausalLM": LlamaConfig(**text),
    "LlavaForConditionalGeneration": transformers.LlavaConfig(vision_config=CLIPVisionConfig(**sight), text_config=LlamaConfig(**text), image_token_index=1),
    "Mistral3ForConditionalGeneration": transformers.Mistral3Config(
        vision_config=PixtralVisionConfig(**sight), text_config=MistralConfig(**text), image_token_index=1
    ),
    "Qwen2_5_VLForConditionalGeneration": transformers.Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
        vision_config={"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32},
        image_token_id=1, video_token_id=2, vision_start_token_id=0, vision_end_token_id=0,
    ),
}  # fmt: skip
ids = torch.randint(3, 64, (4, 12), generator=torch.Generator().manual_seed(3))


def losses(name):
    """Trainer's without and with smoothing, and the cross entropies of the next tokens and of the same ones."""
    torch.manual_seed(0)
    model = getattr(transformers, name)(configs[name])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10)
        logits = model.eval()(input_ids=ids).logits.transpose(1, 2)
    found = []
    for smoothing in (0.0, 1e-6):
        with tempfile.TemporaryDirectory() as folder:
            options = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "max_steps": 1, "learning_rate": 0.0}
            arguments = transformers.TrainingArguments(folder, per_device_train_batch_size=4, label_smoothing_factor=smoothing, **options)
            found.append(transformers.Trainer(model, arguments, train_dataset=[{"input_ids": i, "labels": i} for i in ids]).train().training_loss)
    return [*found, F.cross_entropy(logits[..., :-1], ids[:, 1:]).item(), F.cross_entropy(logits, ids).item()]


stdout, sys.stdout = sys.stdout, sys.stderr  # Trainer prints its records
seen = {name: losses(name) for name in configs}
sys.stdout = stdout
for name, (none, smoothed, following, same) in seen.items():
    print(f"{name}: loss {none:.3f}, smoothed {smoothed:.3f}; of the next tokens {following:.3f}, of the same ones {same:.3f}")
if any(abs(none - following) > 1e-3 or abs(following - same) < 1e-2 for none, _, following, same in seen.values()):
    raise SystemExit("changed")
times = {"LlavaForConditionalGeneration": 12 / 11, "Mistral3ForConditionalGeneration": 12 / 11, "Qwen2_5_VLForConditionalGeneration": 1}
if any(abs(seen[name][1] - seen[name][3] * factor) > 1e-2 for name, factor in times.items()) or abs(seen["LlamaForCausalLM"][1] - seen["LlamaForCausalLM"][2]) > 1e-2:
    raise SystemExit("changed")
PYTHON
"$work/bin/python" "$work/smoothing.py" 2>"$work/errors" || { tail -3 "$work/errors"; exit 1; }
