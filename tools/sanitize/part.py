"""Runs one part of a package's calls: what compute-sanitizer watches.

`python -m tools.sanitize.part PACKAGE PART PARTS [--every 4] [--mark-written]`. The last line says which kernels were
launched, and how often. "planted" for the package: two kernels that are wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections import Counter
from typing import Any

import torch
from npu_tiling import Kernels

from .calls import CALLS
from .written import MarkWritten


def run(package: str, part: int, parts: int, device: torch.device, every: int = 1) -> dict[str, Any]:
    """How many calls and launches there were, kernel by kernel, and the calls that failed; of one call in `every`."""
    launched: Counter[str] = Counter()
    variants: set[object] = set()
    launch = Kernels.launch

    def counted(self: Kernels, module: str, kernel: str, spec: Any, *arguments: Any) -> None:
        launch(self, module, kernel, spec, *arguments)
        launched[kernel] += 1
        variants.add((kernel, *spec.constants.items(), *spec.options.items()))

    Kernels.launch = counted  # type: ignore[method-assign]
    failed, done = [], 0
    for number, (label, call) in enumerate(CALLS[package](device)):
        if number % every or number // every % parts != part:
            continue
        done += 1
        try:
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except Exception as error:
            failed.append(f"{package} {label}: {type(error).__name__}: {str(error)[:300]}")
    Kernels.launch = launch  # type: ignore[method-assign]
    return {"calls": done, "launched": dict(launched), "variants": len(variants), "failed": failed}


def plant(device: torch.device) -> None:
    """Reads past the end of a tensor, and what nobody has written."""
    from .planted import planted_kernel

    out = torch.zeros(64, device=device)
    planted_kernel[(1,)](torch.empty(64, device=device), out, 0)
    torch.cuda.synchronize(device)
    planted_kernel[(1,)](torch.ones(64, device=device), out, 2**20)
    torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(prog="sanitize.part")
    parser.add_argument("package", choices=(*CALLS, "planted"))
    parser.add_argument("part", type=int)
    parser.add_argument("parts", type=int)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--mark-written", action="store_true", help="mark what PyTorch writes as written")
    options = parser.parse_args()
    device = torch.device("cuda")
    with MarkWritten(device) if options.mark_written else contextlib.nullcontext():
        if options.package == "planted":
            plant(device)
        else:
            print(json.dumps(run(options.package, options.part, options.parts, device, options.every)))


if __name__ == "__main__":
    main()
