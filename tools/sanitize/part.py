"""Runs one part of a package's calls: what compute-sanitizer watches. `python -m tools.sanitize.part PACKAGE PART PARTS`.

The last line says which kernels were launched, and how often. "planted" for the package: two kernels that are wrong.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import torch
from npu_tiling.launch import Kernels

from .calls import CALLS


def run(package: str, part: int, parts: int, device: torch.device) -> dict[str, Any]:
    """How many calls and launches there were, kernel by kernel, and the calls that failed."""
    launched: Counter[str] = Counter()
    variants: set[object] = set()
    launch = Kernels.launch

    def counted(self: Kernels, module: str, kernel: str, recipe: Any, *arguments: Any) -> None:
        launch(self, module, kernel, recipe, *arguments)
        launched[kernel] += 1
        variants.add((kernel, *recipe.constants.items(), *recipe.options.items()))

    Kernels.launch = counted  # type: ignore[method-assign]
    failed, done = [], 0
    for number, (label, call) in enumerate(CALLS[package](device)):
        if number % parts != part:
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


def main(arguments: list[str]) -> None:
    package, part, parts = arguments[0], int(arguments[1]), int(arguments[2])
    device = torch.device("cuda")
    if package == "planted":
        plant(device)
        return
    print(json.dumps(run(package, part, parts, device)))


if __name__ == "__main__":
    main(sys.argv[1:])
