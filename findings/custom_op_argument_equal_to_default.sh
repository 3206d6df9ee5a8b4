#!/usr/bin/env bash
# A custom operator with a list of tensors has no gradient when an option is passed that equals its default. Another value works.
#
# Versions: torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11.
# Expected: total([x, x], 2.0), total([x, x]) and total([x, x], 3.0) have gradients, whatever the default of `scale` is.
# Seen on 2026-11-30, with `scale: float = 2.0`:
#     total([x, x], 3.0): gradient [6.0, 6.0]
#     total([x, x], 2.0): RuntimeError: Expected the return from backward to be of the same structure as the inputs.
#     total([x, x]): the same
#     total_of_one(x, 2.0), without a list: gradient [2.0, 2.0]
#   The dispatcher leaves out trailing arguments that equal their defaults, also those that were passed. The backward formula returns a
#   gradient for each argument, and only the check for operators with lists compares that with what is left. So training ends with an
#   error on the day on which a configuration says what the default says.
# A way round: no default in the operator's schema; the public function in front of it has the defaults.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6

cat >"$work/total.py" <<'PYTHON'
from collections.abc import Sequence

import torch


@torch.library.custom_op("findings::total", mutates_args=())
def total(xs: Sequence[torch.Tensor], scale: float = 2.0) -> torch.Tensor:
    return torch.stack(list(xs)).sum(0) * scale


@torch.library.custom_op("findings::total_of_one", mutates_args=())
def total_of_one(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    return x * scale


def remember(ctx, inputs, output):
    ctx.count, ctx.scale = len(inputs[0]), inputs[1]


total.register_autograd(lambda ctx, grad: ([grad * ctx.scale] * ctx.count, None), setup_context=remember)
total_of_one.register_autograd(lambda ctx, grad: (grad * ctx.scale, None), setup_context=remember)

x = torch.ones(2, requires_grad=True)
seen = []
for name, call in {
    "total([x, x], 3.0)": lambda: total([x, x], 3.0),
    "total([x, x], 2.0)": lambda: total([x, x], 2.0),
    "total([x, x])": lambda: total([x, x]),
    "total_of_one(x, 2.0)": lambda: total_of_one(x, 2.0),
}.items():
    try:
        seen.append(torch.autograd.grad(call().sum(), x)[0].tolist())
    except RuntimeError as error:
        seen.append("same structure as the inputs" in str(error))
    print(name, seen[-1])
if seen != [[6.0, 6.0], True, True, [2.0, 2.0]]:
    raise SystemExit("changed")
PYTHON
"$work/bin/python" "$work/total.py"
