"""One rank of `python -m tools.several_gpus`; the first rank prints results.

Its arguments are the place, the size, and the names of the measurements, which are modules of this folder.
"""

from __future__ import annotations

import datetime
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from testing import ranks

sys.path.insert(0, str(Path(__file__).parents[2]))


def main() -> None:
    place, size, *names = sys.argv[1:]
    with ranks.join(place) as rank:
        device = torch.get_default_device()
        torch.set_default_device(None)  # which slows every call of PyTorch on the host
        results: dict[str, Any] = {
            "device": torch.cuda.get_device_name(device) if place == "cuda" else "CPU",
            "torch": torch.__version__,
            "date": datetime.date.today().isoformat(),
        }
        for name in names:
            results[name] = []
            for row in importlib.import_module(f"tools.several_gpus.{name}").measure(rank, device, tiny=size == "tiny"):
                results[name].append(row)
                if rank == 0:
                    print(name, json.dumps(row), file=sys.stderr, flush=True)  # is shown where the run fails later
        if rank == 0:
            print(json.dumps(results))


if __name__ == "__main__":
    main()
