#!/usr/bin/env bash
# The classes of transformers that are named ...RMSNorm round in two ways, and one that is named ...L2Norm is an RMS norm.
#
# Versions: transformers 5.24.0, torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11.
# Input: one bfloat16 tensor and one bfloat16 weight for all (less 1 where a class adds 1 to its weight: exact for these numbers).
#   Norms with a gate, without a weight, or adapted to a condition are left out.
# Expected: one result, x * rsqrt(mean(x^2) + eps) * weight, whatever the model is called.
# Seen on 2026-11-30: 144 classes (Llama, Qwen3, DeepSeek V3) round before and after the product with the weight; 41 (Gemma, DeepSeek V4,
#   Olmo 2) round once; bit by bit, over all of a group. A quarter of the elements differ between the groups. One class is neither.
#   With a float32 weight Llama's returns float32, and Olmo 2's bfloat16. A kernel that replaces "the RMSNorm" of a model has to know which:
#   DeepseekV3RMSNorm and DeepseekV4RMSNorm differ. Llama4TextL2Norm returns rows of length sqrt(n), not 1.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet transformers==5.24.0 torch==2.13.0 numpy==2.4.6

cat >"$work/norms.py" <<'PYTHON'
import collections
import importlib
import pathlib
import re

import torch
import transformers
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm

torch.manual_seed(0)
x = (torch.randn(64, 256) * 3).bfloat16()
weight = (1 + torch.rand(256) * 0.9).bfloat16()
alike = collections.defaultdict(list)
for file in sorted(pathlib.Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
    names = re.findall(r"^class (\w*(?:RMSNorm|RmsNorm)\w*)\(nn\.Module\)", file.read_text(), re.M)
    names = [name for name in names if "Gated" not in name and "Unweighted" not in name and "Ada" not in name]
    if not names:
        continue
    module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
    for name in names:
        norm = getattr(module, name)(256, eps=1e-6)
        (parameter,) = norm.parameters()
        added = parameter.abs().max().item() == 0
        norm.bfloat16()
        next(norm.parameters()).data = weight - 1 if added else weight.clone()
        alike[norm(x).detach().float().numpy().tobytes()].append(name)
normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
definitions = {
    "rounded before and after the weight": (normed.bfloat16() * weight).float().numpy().tobytes(),
    "rounded once": (normed * weight.float()).bfloat16().float().numpy().tobytes(),
}
seen = []
for name, result in definitions.items():
    names = alike.pop(result, [])
    seen.append(len(names))
    print(f"{name}: {len(names)}, such as", ", ".join([n for n in names if re.match("Llama|Qwen3R|Gemma|Olmo2|DeepseekV", n)][:6]))
print("neither:", *alike.values())
length = Llama4TextL2Norm(1e-6)(torch.full((1, 4), 3.0)).norm().item()
print("length of what Llama4TextL2Norm returns, 4 numbers:", round(length, 3))
if seen != [144, 41] or round(length, 3) != 2:
    raise SystemExit("changed")
PYTHON
"$work/bin/python" "$work/norms.py"
