#!/usr/bin/env bash
# torch's clip_grad_norm_ makes zeros of float16 gradients that are all finite, once their norm is above 65504: the step is lost.
#
# Versions: torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11.
# Input: a million gradients of 100, norm 1e5; and four tensors of 10,000 gradients of 400, with norms of 40,000 each, 80,000 together.
#   max_norm=1.
# Expected: gradients with the norm 1, as float32 and bfloat16 have them. The sums of squares are made in float32.
# Seen on 2026-11-30, the norm that is returned, and the norm of the clipped gradients, without a warning, foreach=True and False:
#     float32      99,937 and 80,000; 1.0006 and 1.0000
#     bfloat16     99,840 and 79,872; 0.9995 and 1.0010
#     float16      inf and inf; 0
#   The norm is rounded to the gradients' dtype, each tensor's and their sum's. 1 / inf is 0. Clipping is there for the step that is too large,
#   which is the one that is left out; with momentum and weight decay the weights move all the same. error_if_nonfinite is off by default.
# A way round: clip_grads_with_norm_ with a total norm of the gradients in float32; error_if_nonfinite=True to see it.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6

cat >"$work/clip.py" <<'PYTHON'
import torch


def clip(dtype, shapes, value, **options):
    """The norm that is returned, and that of the clipped gradients."""
    parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, value)
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0, **options)
    return norm.item(), sum(parameter.grad.double().square().sum() for parameter in parameters).sqrt().item()


cases = {"one tensor": ([1_000_000], 100.0), "four tensors": ([10_000] * 4, 400.0)}
seen = {}
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for name, (shapes, value) in cases.items():
        for foreach in (True, False):
            norm, clipped = seen[dtype, name, foreach] = clip(dtype, shapes, value, foreach=foreach)
            print(f"{dtype}, {name}, foreach={foreach}: norm {norm:,.0f}, clipped {clipped:.4f}")
if any(clipped != 0 if dtype == torch.float16 else abs(clipped - 1) > 0.01 for (dtype, *_), (_, clipped) in seen.items()):
    raise SystemExit("changed")
PYTHON
"$work/bin/python" "$work/clip.py"
