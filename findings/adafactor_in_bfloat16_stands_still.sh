#!/usr/bin/env bash
# torch's Adafactor of bfloat16 parameters takes steps a thousand times too short: its eps is 0.0078 there, and small gradients count squared.
#
# Versions: torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11.
# Input: Adafactor(lr=0.01), its other options as they are, of a matrix [64, 64]; ten steps of random gradients of one size.
# Expected: one way for gradients of any size, as a factored second moment divides by their size, and float32 has it. The paper's eps is 1e-30.
# Seen on 2026-12-01, mean way of a parameter:
#     gradients of   1e-2     1e-3     1e-4     1e-5
#     float32        2.5e-5   2.5e-5   2.5e-5   2.5e-5
#     bfloat16       2.6e-5   2.3e-6   3.2e-8   2.9e-10
#     float16        2.5e-5   2.5e-5   2.6e-6   1.3e-7
#     bfloat16, eps=(1e-16, 1e-3): 2.6e-5 for all
#   eps[0] is finfo(dtype).eps unless it is given: the mean of a row's squares is raised to it before the factors are divided, and the root again.
#   Gradients of a language model are 1e-4 and less. The documentation says that eps differs from the paper, and not that it is of this size.
# A way round: eps=(1e-16, 1e-3).
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6

cat >"$work/adafactor.py" <<'PYTHON'
import torch

SIZES = (1e-2, 1e-3, 1e-4, 1e-5)


def way(dtype, size, **options):
    """Mean distance that ten steps took the parameters."""
    torch.manual_seed(0)
    parameter = torch.nn.Parameter((torch.randn(64, 64) * 1e-3).to(dtype))
    start = parameter.detach().float().clone()
    optimizer = torch.optim.Adafactor([parameter], lr=0.01, weight_decay=0.0, **options)
    for _ in range(10):
        parameter.grad = (torch.randn(64, 64) * size).to(dtype)
        optimizer.step()
    return (parameter.detach().float() - start).abs().mean().item()


cases = {
    "float32": (torch.float32, {}),
    "bfloat16": (torch.bfloat16, {}),
    "float16": (torch.float16, {}),
    "bfloat16, eps given": (torch.bfloat16, {"eps": (1e-16, 1e-3)}),
}
seen = {name: [way(dtype, size, **options) for size in SIZES] for name, (dtype, options) in cases.items()}
for name, ways in seen.items():
    print(f"{name}: " + ", ".join(f"{way:.1e}" for way in ways))
right = seen["float32"][0]
for name in ("float32", "bfloat16, eps given"):
    if any(abs(way / right - 1) > 0.2 for way in seen[name]):
        raise SystemExit("changed")
if seen["bfloat16"][2] > right / 500 or seen["bfloat16"][3] > right / 50000 or seen["float16"][3] > right / 50:
    raise SystemExit("changed")
PYTHON
"$work/bin/python" "$work/adafactor.py"
