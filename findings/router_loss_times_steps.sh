#!/usr/bin/env bash
# transformers' Trainer: a mixture of experts' router loss counts once for each accumulated batch, and not at all with label smoothing.
#
# Versions: transformers 5.24.0, accelerate 1.15.0, torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11.
# Input: one step of SGD over four copies of one sequence, without padding, output_router_logits=True: one batch of four, four accumulated
#   batches of one, and one batch of four with label_smoothing_factor=1e-6, which is no smoothing to speak of. The copies have one router
#   loss, whatever batch they are in.
# Expected: one change of the weights: cross entropy + router_aux_loss_coef * router loss.
# Seen on 2026-11-30: the change of the weights is the cross entropy's and as many times the router loss's, without a warning:
#     Mixtral, Qwen3-MoE, OLMoE    one batch 1.00, four accumulated 4.00, smoothing 0.00
#   The cross entropy is divided by the step's number of tokens, and the router loss is added behind that; with smoothing the model is not
#   given the labels, and adds no router loss to none. A coefficient that was tuned with another accumulation is another coefficient.
#   With several processes the router loss is multiplied as well (transformers' #48690).
# A way round: router_aux_loss_coef divided by gradient_accumulation_steps.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet transformers==5.24.0 accelerate==1.15.0 torch==2.13.0 numpy==2.4.6

cat >"$work/router.py" <<'PYTHON'
import logging
import sys
import tempfile
import warnings

import torch
import transformers

warnings.simplefilter("ignore")
logging.disable()
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
sizes |= {"moe_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
ids = torch.randint(3, 64, (16,), generator=torch.Generator().manual_seed(3))


def change(family, coefficient, batch, **options):
    """Of the weights, by a step over four copies of the sequence in batches of this size."""
    config = getattr(transformers, f"{family}Config")
    known = config().to_dict()
    torch.manual_seed(0)
    given = {key: value for key, value in sizes.items() if key in known}
    model = getattr(transformers, f"{family}ForCausalLM")(config(**given, router_aux_loss_coef=coefficient))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with tempfile.TemporaryDirectory() as folder:
        options |= {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "max_steps": 1, "max_grad_norm": 0}
        options |= {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "per_device_train_batch_size": batch}
        arguments = transformers.TrainingArguments(folder, gradient_accumulation_steps=4 // batch, **options)
        transformers.Trainer(model, arguments, train_dataset=[{"input_ids": ids, "labels": ids}] * 4).train()
    return torch.cat([(one - other).flatten().detach() for one, other in zip(before, model.parameters())])


def router_losses(family):
    """How many times each way to make the step has the router loss in it."""
    none, one = change(family, 0.0, 4), change(family, 1.0, 4) 
    ways = [one, change(family, 1.0, 1), change(family, 1.0, 4, label_smoothing_factor=1e-6)]
    return [round((((way - none) @ (one - none)) / (one - none).square().sum()).item(), 2) for way in ways]


stdout, sys.stdout = sys.stdout, sys.stderr  # Trainer prints its records
seen = {family: router_losses(family) for family in ("Mixtral", "Qwen3Moe", "Olmoe")}
sys.stdout = stdout
for family, (at_once, accumulated, smoothed) in seen.items():
    print(f"{family}: router loss in one batch {at_once} times, in four accumulated ones {accumulated} times, with smoothing {smoothed} times")
if any(max(abs(a - b) for a, b in zip(times, (1, 4, 0))) > 0.03 for times in seen.values()):
    raise SystemExit("changed")
PYTHON
"$work/bin/python" "$work/router.py" 2>"$work/errors" || { tail -3 "$work/errors"; exit 1; }
