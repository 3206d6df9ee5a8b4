"""One rank of `python -m tools.several_gpus`: its arguments are the place and the size; the first rank prints results."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path

import torch

from testing import ranks

sys.path.insert(0, str(Path(__file__).parents[2]))
from tools.several_gpus import operators, training  # noqa: E402


def main() -> None:
    place, size = sys.argv[1:]
    with ranks.join(place) as rank:
        device = torch.get_default_device()
        results = {
            "device": torch.cuda.get_device_name(device) if place == "cuda" else "CPU",
            "torch": torch.__version__,
            "date": datetime.date.today().isoformat(),
            "operators": list(operators.measure(rank, tiny=size == "tiny")),
            "training": list(training.measure(rank, tiny=size == "tiny")),
        }
        if rank == 0:
            print(json.dumps(results))


if __name__ == "__main__":
    main()
