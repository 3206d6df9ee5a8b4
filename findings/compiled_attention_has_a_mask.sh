#!/usr/bin/env bash
# torch.compile of a transformers model gives its attention a mask and repeated keys where the eager model says is_causal: twice the products.
#
# Versions: torch 2.13.0 (a CPU build is enough), transformers 5.24.0, numpy 2.4.6, Python 3.11.
# Input: Llama with 4 heads and 2 of keys, input_ids and labels of 2 x 16, no padding, no attention_mask; torch.compile(fullgraph=True).
# Expected: the graph calls scaled_dot_product_attention as the eager model does: no mask, is_causal=True, enable_gqa=True.
# Seen on 2026-11-30: the eager model does. In the compiled graph attn_mask is bool [2, 1, 16, 16], is_causal False, and keys have 4 heads.
#   Whether a mask can be left out depends on its values, which a traced model does not look at. But where is_causal holds, half of the
#   products are skipped and no mask is read. In a training step of Llama 3.2 1B, 4 x 2048 tokens in bf16 on one H200 (torch 2.11.0,
#   cuDNN's attention; norms, embedding and loss by other kernels), attention took 12 ms eager and 35 compiled, of 127 and 134 in all.
# A way round, where all masks are causal and nothing is padded: a function that calls scaled_dot_product_attention with is_causal=True
#   and enable_gqa=True, AttentionInterface.register("causal", it) and model.set_attn_implementation("causal").
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 numpy==2.4.6

cat >"$work/masks.py" <<'PYTHON'
from unittest import mock

import torch
from torch.nn import functional
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False))
tokens = torch.randint(64, (2, 16))
attend, eager, compiled = functional.scaled_dot_product_attention, [], []


def noted(query, key, value, **options):
    eager.append((options.get("attn_mask"), options.get("is_causal"), key.shape[1]))
    return attend(query, key, value, **options)


def backend(graph, inputs):
    for node in graph.graph.nodes:
        if node.target is attend:
            mask = node.kwargs["attn_mask"].meta["example_value"]
            compiled.append((mask.dtype, tuple(mask.shape), node.kwargs["is_causal"], node.args[1].meta["example_value"].shape[1]))
    return graph


with mock.patch.object(functional, "scaled_dot_product_attention", noted):
    one = model(input_ids=tokens, labels=tokens).loss
other = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)(input_ids=tokens, labels=tokens).loss


def causal(module, query, key, value, attention_mask, scaling=None, **options):
    out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), attention_mask


AttentionInterface.register("causal", causal)
model.set_attn_implementation("causal")
graphs = []
round_it = torch.compile(model, fullgraph=True, dynamic=False, backend=lambda graph, inputs: graphs.append(graph) or graph)
same = round_it(input_ids=tokens, labels=tokens).loss
(call,) = (node for graph in graphs for node in graph.graph.nodes if node.target is attend)
assert same.item() == one.item()
assert "attn_mask" not in call.kwargs
print("eager", eager, "compiled", compiled, round(one.item(), 5), round(other.item(), 5))
if eager != [(None, True, 2)] or compiled != [(torch.bool, (2, 1, 16, 16), False, 4)]:
    raise SystemExit("changed")
PYTHON
"$work/bin/python" -W ignore "$work/masks.py"
