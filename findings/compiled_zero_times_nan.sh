#!/usr/bin/env bash
# torch.compile: x * 0 is 0 also where x is NaN or infinite, and x * 0.0 is NaN there, as both are without it.
#
# Versions: torch 2.13.0 (a CPU build is enough; it needs a C++ compiler), numpy 2.4.6, Python 3.11.
# Input: x = NaN, inf, -1, 2 in float32.
# Expected: eager mode's values, by which NaN and inf times 0 are NaN, whether the 0 is an int or a float.
# Seen on 2026-11-30, eager mode beside compiled, without a warning:
#     x * 0, 0 * x, 0 / x                nan nan -0 0 (0 / x: nan 0 -0 0)    compiled: 0 0 0 0
#     x * 0 == 0                         false false true true               compiled: true
#     1 + 0 * x.sum()                    nan                                 compiled: 1
#     x * 0.0, 1 + 0.0 * x.sum(), x - x, torch.zeros_like(x) * x             the same in both
#   `0 * parameter.sum()` is added to a loss so that every parameter has a gradient (DDP, FSDP), and x * 0 == 0 is a test for finite numbers:
#   compiled, the first hides that a parameter has become NaN, and the second is always true. PyTorch's #187580 was to mend it.
# A way round: 0.0 in place of 0; torch.isfinite for the test.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6

cat >"$work/zero.py" <<'PYTHON'
import torch

x = torch.tensor([float("nan"), float("inf"), -1.0, 2.0])
functions = {
    "x * 0": lambda x: x * 0,
    "0 * x": lambda x: 0 * x,
    "0 / x": lambda x: 0 / x,
    "x * 0 == 0": lambda x: x * 0 == 0,
    "1 + 0 * x.sum()": lambda x: 1 + 0 * x.sum(),
    "x * 0.0": lambda x: x * 0.0,
    "1 + 0.0 * x.sum()": lambda x: 1 + 0.0 * x.sum(),
    "x - x": lambda x: x - x,
    "zeros_like(x) * x": lambda x: torch.zeros_like(x) * x,
}
differ = []
for name, function in functions.items():
    torch._dynamo.reset()
    eager, compiled = function(x), torch.compile(function)(x)
    print(f"{name}: eager {eager.tolist()}, compiled {compiled.tolist()}")
    if not torch.allclose(eager.float(), compiled.float(), equal_nan=True):
        differ.append(name)
if differ != list(functions)[:5]:
    raise SystemExit("changed")
PYTHON
"$work/bin/python" "$work/zero.py"
