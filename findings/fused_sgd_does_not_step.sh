#!/usr/bin/env bash
# torch.optim.SGD(fused=True) on a CPU leaves bfloat16 and float16 parameters as they are: no step has an effect, and nothing says so.
#
# Versions: torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11.
# Input: a parameter of 128 zeros, gradients of 1, the learning rate 1, four steps, with and without momentum 0.5.
# Expected: what foreach=True and the plain loop do: -4 at the end without momentum, -6.125 with it.
# Seen on 2026-11-30, the parameter, and the momentum buffer, which must be 1.875:
#     float32                    -4, -6.125; 1.875
#     bfloat16                    0, 0; 1 to 1.875
#     float16                     0, 0; 1 to 1.0039
#   Adam, AdamW and Adagrad with fused=True are right. Whole vector registers are computed and not stored: of a parameter with fewer elements than
#   a register all are changed, and of others those behind the last whole register, as a test with small layers has them. A fine-tuning on a CPU
#   trains some biases. PyTorch has mended it since (its #191763).
# A way round: fused=False.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6

cat >"$work/sgd.py" <<'PYTHON'
import torch


def steps(dtype, momentum, **options):
    """The parameter's values after four steps, and the buffer's."""
    parameter = torch.nn.Parameter(torch.zeros(128, dtype=dtype))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=momentum, **options)
    for _ in range(4):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    buffer = optimizer.state[parameter].get("momentum_buffer")
    return parameter.unique().tolist(), None if buffer is None else buffer.unique().tolist()


seen = {}
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for momentum in (0.0, 0.5):
        fused, foreach = (steps(dtype, momentum, **{way: True}) for way in ("fused", "foreach"))
        seen[dtype, momentum] = fused[0], foreach[0]
        print(f"{dtype}, momentum {momentum}: parameter {fused[0]}, foreach {foreach[0]}; buffer {fused[1]}, foreach {foreach[1]}")
right = {0.0: [-4.0], 0.5: [-6.125]}
if any(foreach != right[momentum] or fused != (foreach if dtype == torch.float32 else [0.0]) for (dtype, momentum), (fused, foreach) in seen.items()):
    raise SystemExit("changed")
PYTHON
"$work/bin/python" "$work/sgd.py"
