"""Compiles and launches every tile of a package on the device: `python -m tools.acceptance.tiles PACKAGE DEVICE FILE TEXT`.

Of the calls that have TEXT in their label; "" is in all. A process of its own, because a kernel that faults may leave a
device that runs nothing more; each result is written at once.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import npu_offline
import torch
from npu_offline.check import load_calls

from ..workspace import ROOT

_SHOWN = 2000  # characters of an error: the compiler's last words


def place(device: str) -> AbstractContextManager[Any]:
    """In the block new tensors are on the device, and kernels are compiled for it: by its own compiler, if it is there."""
    return npu_offline.emulate() if device == "emulated" else torch.device(device)


def run(calls: Iterable[tuple[str, Callable[[], None]]], synchronize: Callable[[], None]) -> Iterator[dict[str, Any]]:
    """Each call's label, whether it ran, the seconds it took (the compiler's, mostly) and its error."""
    for label, call in calls:
        start, error = time.perf_counter(), None
        try:
            call()
            synchronize()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"[-_SHOWN:]
        yield {"call": label, "seconds": round(time.perf_counter() - start, 3), "error": error}


def main(arguments: list[str]) -> int:
    package, device, file, matching = arguments
    calls = [(label, call) for label, call in load_calls(ROOT / "packages" / package) if matching in label]
    if device == "npu":
        import torch_npu  # noqa: F401 - adds torch.npu
    backend = getattr(torch, device, None)  # none where the device is emulated: a call that returned has run
    with place(device), Path(file).open("w") as opened:
        for result in run(calls, backend.synchronize if backend else lambda: None):
            opened.write(json.dumps(result) + "\n")
            opened.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
