"""`python -m tools.large [--only rms_norm]`: a line for each call, with the largest error as a share of what is allowed.

Ends with 1 where a share is above 1, or a call failed. `--elements` and `--device cpu` make it small, to try the program.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from .losses import losses
from .rows import depths, norms, tables

OPERATORS = {"rms_norm": norms, "embedding": tables, "attn_res": depths, "fused_linear_cross_entropy": losses}


def main() -> int:
    parser = argparse.ArgumentParser(prog="large", description="Operators on tensors of more than 2^31 elements.")
    parser.add_argument("--only", nargs="+", choices=tuple(OPERATORS), default=tuple(OPERATORS))
    parser.add_argument("--elements", type=int, default=2**31)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.manual_seed(0)
    if device.type == "cuda":
        print(
            f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}; errors as shares of what is allowed",
            flush=True,
        )
    good = True
    for operator in options.only:
        started = time.monotonic()
        try:
            for what, found in OPERATORS[operator](options.elements, device):
                fine = all(share <= 1 for share in found.values())
                good &= fine
                errors = ", ".join(f"{name} {share:.3g}" for name, share in found.items())
                print(f"{'ok   ' if fine else 'WRONG'} {what}: {errors}{_cost(device, started)}", flush=True)
                started = time.monotonic()
        except Exception as error:
            good = False
            print(f"FAILED {operator}, the next call: {type(error).__name__}: {str(error)[:500]}", flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return 0 if good else 1


def _cost(device: torch.device, started: float) -> str:
    if device.type != "cuda":
        return ""
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) / 2**30
    torch.cuda.reset_peak_memory_stats(device)
    torch.cuda.empty_cache()
    return f"; {time.monotonic() - started:.1f} s, {peak:.0f} GiB"


if __name__ == "__main__":
    sys.exit(main())
