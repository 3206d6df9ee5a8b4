#!/usr/bin/env bash
# transformers: twelve classes for causal language models do not shift labels: given labels=input_ids, they learn to copy their input.
#
# Versions: transformers 5.24.0, torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11.
# Input: what DataCollatorForLanguageModeling(mlm=False) makes for all of them, labels that are input_ids. For two of them also 60 steps of
#   AdamW, each with new random tokens of 61.
# Expected: the cross entropy of each position's logits and the next token, as that collator leaves the shift to the model. No model predicts
#   a random token: log(61) = 4.11 is the least loss.
# Seen on 2026-11-30, without a warning:
#     Llama, GPT2, OPT, RoBERTa, BERT and others shift. After 60 steps: Llama 4.12
#     BART, MBart, Marian, Pegasus, BigBirdPegasus, Blenderbot, BlenderbotSmall, PLBart, MVP, TrOCR, Whisper, XLNet do not. BART 0.00
#   Their loss compares the logits at a token with that token, which the model has read. Perplexity ends at 1, and what is generated
#   repeats its last token. An operator that is put in place of "the" causal loss has to know which of the two it replaces.
#   Users have reported single classes since 2021 (transformers' #10480, #27517, #30105, all closed).
# A way round: labels that are shifted by the user for these classes, F.pad(ids[:, 1:], (0, 1), value=-100).
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet transformers==5.24.0 torch==2.13.0 numpy==2.4.6

cat >"$work/shift.py" <<'PYTHON'
import logging
import warnings

import torch
import torch.nn.functional as F
import transformers

warnings.simplefilter("ignore")
logging.disable()
shifted = ["LlamaForCausalLM", "GPT2LMHeadModel", "OPTForCausalLM", "RobertaForCausalLM", "BertLMHeadModel"]
decoders = ["Bart", "MBart", "Marian", "Pegasus", "BigBirdPegasus", "Blenderbot", "BlenderbotSmall", "PLBart", "Mvp", "TrOCR", "Whisper"]
copying = [f"{name}ForCausalLM" for name in decoders] + ["XLNetLMHeadModel"]
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "n_embd": 32, "n_layer": 1}
sizes |= {"n_head": 2, "d_model": 32, "d_inner": 64, "ffn_dim": 64, "is_decoder": True, "max_position_embeddings": 64, "max_target_positions": 64}
for side in ("encoder", "decoder"):
    sizes |= {f"{side}_layers": 1, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 64, f"{side}_layerdrop": 0.0}
sizes |= {"dropout": 0.0, "word_embed_proj_dim": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def make(name):
    config = getattr(transformers, name).config_class
    known = config().to_dict()
    torch.manual_seed(0)
    return getattr(transformers, name)(config(**{key: value for key, value in sizes.items() if key in known}))


def shifts(name):
    """Whether the loss is that of the next tokens (True), of the same ones (False), or another one (None)."""
    model, ids = make(name).eval(), torch.randint(3, 64, (2, 12))
    for parameter in model.parameters():
        parameter.data.mul_(10)
    with torch.no_grad():
        found = model(input_ids=ids, labels=ids)
    logits = found.logits.transpose(1, 2)
    losses = {True: F.cross_entropy(logits[..., :-1], ids[:, 1:]), False: F.cross_entropy(logits, ids)}
    return next((way for way, loss in losses.items() if abs(loss - found.loss) < 1e-4), None)


def loss_of_random_tokens(name):
    model = make(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    for _ in range(60):
        ids = torch.randint(3, 64, (16, 12))
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


seen = {name: shifts(name) for name in shifted + copying}
print("shift:", *(name for name, way in seen.items() if way))
print("do not shift:", *(name for name, way in seen.items() if way is False))
llama, bart = (loss_of_random_tokens(name) for name in ("LlamaForCausalLM", "BartForCausalLM"))
print(f"after 60 steps of random tokens: Llama {llama:.2f}, BART {bart:.2f}")
if seen != {**dict.fromkeys(shifted, True), **dict.fromkeys(copying, False)} or llama < 4 or bart > 0.5:
    raise SystemExit("changed")
PYTHON
"$work/bin/python" "$work/shift.py"
