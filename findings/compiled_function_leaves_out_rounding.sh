#!/usr/bin/env bash
# torch.compile leaves out a cast to bfloat16 or float16 that is cast back, so that an overflow that eager mode has is not there.
#
# Versions: torch 2.13.0 (a CPU build is enough; it needs a C++ compiler), numpy 2.4.6, Python 3.11.
# Expected: the values of eager mode. Who writes x.to(torch.bfloat16).to(torch.float32) wants the rounding, and nothing else.
# Seen on 2026-11-30, share of 1000 random numbers that equal eager mode's:
#     x.bfloat16().float()          none, and all equal x: the function does nothing
#     x.half().float() of 1e6       1e6, and inf in eager mode
#     x.to(torch.float8_e4m3fn)...  100 %: casts to 8 bits are kept
#     b = x.bfloat16(); return b, b.float() * 3: the second result is not three times the first one
#   So a test of a kernel's rounding against a compiled reference compares with another definition, and quantisation that is tried out
#   in 16 bits costs no accuracy once it is compiled, until it is exported.
# A way round: torch._inductor.config.emulate_precision_casts = True, which is off by default, gives eager mode's values.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6

cat >"$work/casts.py" <<'PYTHON'
import torch


def through_bfloat16(x):
    return x.bfloat16().float()


def through_half(x):
    return x.half().float()


def through_float8(x):
    return x.to(torch.float8_e4m3fn).float()


def two_results(x):
    b = x.bfloat16()
    return b, b.float() * 3


def share(a, b):
    return round((a == b).float().mean().item(), 3)


torch.manual_seed(0)
x = torch.randn(1000)
compiled = torch.compile(through_bfloat16)(x)
first, second = torch.compile(two_results)(x)
large = torch.full((8,), 1e6)
seen = {
    "bfloat16, equal to eager mode": share(compiled, through_bfloat16(x)) < 0.1,
    "bfloat16, equal to x": share(compiled, x) == 1,
    "float16 of 1e6, eager": through_half(large)[0].item() == float("inf"),
    "float16 of 1e6, compiled": torch.compile(through_half)(large)[0].item() == 1e6,
    "float8, equal to eager mode": share(torch.compile(through_float8)(x), through_float8(x)) == 1,
    "second result is three times the first": share(second, first.float() * 3) < 0.1,
}
print("bfloat16, equal to eager mode:", share(compiled, through_bfloat16(x)), "equal to x:", share(compiled, x))
print("second result, equal to three times the first:", share(second, first.float() * 3))
print("as on 2026-11-30:", seen)
if not all(seen.values()):
    raise SystemExit("changed")
PYTHON
TORCHINDUCTOR_CACHE_DIR=$work/cache "$work/bin/python" "$work/casts.py"
