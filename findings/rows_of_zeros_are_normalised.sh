#!/usr/bin/env bash
# F.normalize of a row of zeros is NaN in float16; in float32 its gradient is 1e12, beside which clipping leaves nothing of all other rows.
#
# Versions: torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11.
# Input: rows of zeros with the default eps, also by cosine_similarity; and an embedding with padding_idx=0, a projection, F.normalize, a loss, and
#   clip_grad_norm_ with max_norm=1, of one token without and with a padded one beside it.
# Expected: zeros in each dtype, as eps is there "to avoid division by zero"; a gradient that padding does not decide.
# Seen on 2026-12-01, without an error or a warning:
#     normalize, cosine_similarity                float16 NaN, NaN; bfloat16 and float32 0, 0
#     norm of the gradient                        3.5 without the padded token, 2.5e12 with it
#     the weight's gradient, clipped              0.91 and 1.3e-12
#   1e-12 and 1e-8 are 0 in float16. The formula is x / max(|x|, eps): its slope at 0 is 1 / eps. A mean over padding, an unknown token or a bias
#   that starts at 0 makes such rows; a mask of the loss behind it is too late for the NaN. The NaN is PyTorch's #32137 (2020, open).
# A way round: normalise the rows that are none, y = F.normalize(x[mask]). With eps=1e-5 there is no NaN, and still a norm of 2.5e5.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6

cat >"$work/zeros.py" <<'PYTHON'
import math

import torch
import torch.nn.functional as F

values = {}
for dtype in (torch.float16, torch.bfloat16, torch.float32):
    rows = torch.zeros(1, 8, dtype=dtype)
    values[dtype] = F.normalize(rows, dim=-1)[0, 0].item(), F.cosine_similarity(rows, torch.ones_like(rows)).item()
    print(f"{dtype}: normalize {values[dtype][0]}, cosine_similarity {values[dtype][1]}")


def clipped(padded, **options):
    """Norm of a projection's gradient, and that of its weight's after clipping."""
    torch.manual_seed(0)
    embedding, projection = torch.nn.Embedding(4, 8, padding_idx=0), torch.nn.Linear(8, 8)
    torch.nn.init.zeros_(projection.bias)
    weights = torch.randn(2, 8)
    ids = torch.tensor([0, 1] if padded else [1])
    y = F.normalize(projection(embedding(ids)), dim=-1, **options)
    (y * weights[-len(ids) :]).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(projection.parameters(), 1.0).item()
    return norm, projection.weight.grad.norm().item()


alone, both, safe = clipped(False), clipped(True), clipped(True, eps=1e-5)
print(f"gradient's norm: {alone[0]:.3g} without the padded row, {both[0]:.3g} with it, {safe[0]:.3g} with eps=1e-5")
print(f"the weight's after clipping: {alone[1]:.3g} and {both[1]:.3g}")
if not all(map(math.isnan, values[torch.float16])) or set(values[torch.bfloat16] + values[torch.float32]) != {0.0}:
    raise SystemExit("changed")
if alone[0] > 100 or both[0] < 1e11 or both[1] > 1e-10:
    raise SystemExit("changed")
PYTHON
"$work/bin/python" "$work/zeros.py"
