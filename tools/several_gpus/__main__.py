"""Operators that are split over several GPUs beside one GPU, and a model under FSDP2: `python -m tools.several_gpus`.

Every rank is a process with a GPU of its own, and they talk through NCCL. Tables are printed, and kept with `--out`.
`--place cpu --tiny` tries the program on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from testing import ranks

WORKER = Path(__file__).with_name("worker.py")


def main() -> int:
    parser = argparse.ArgumentParser(prog="several_gpus", description="Operators and a model on several GPUs.")
    parser.add_argument("--place", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the program")
    parser.add_argument("--out", type=Path, help="a file for the results, as JSON and as Markdown")
    options = parser.parse_args()
    if (reason := ranks.why_not(options.place, options.ranks)) is not None:
        print(f"Not run: {reason}.", file=sys.stderr)
        return 1
    said = ranks.run(WORKER, options.ranks, options.place, "tiny" if options.tiny else "whole", timeout=600)
    results = json.loads(said[0].splitlines()[-1])
    results["ranks"] = options.ranks
    print(tables(results))
    if options.out:
        options.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(tables(results))
    return 0


def tables(results: dict[str, Any]) -> str:
    """Results as Markdown."""
    where = f"{results['device']}, {results['ranks']} ranks, torch {results['torch']}"
    lines = [
        f"{where}, {results['date']}. Wall time with the host's work.",
        "",
        "| tokens x width x vocabulary, forward and backward, ms | one rank | all ranks | times as fast |",
        "|---|---|---|---|",
    ]
    for row in results["operators"]:
        lines.append(f"| {row['name']} | {row['one']:.3f} | {row['all']:.3f} | {row['one'] / row['all']:.2f} |")
    lines += ["", "| FSDP2 | tokens/s | peak GiB of a rank | last loss |", "|---|---|---|---|"]
    for row in results["training"]:
        lines.append(f"| {row['name']} | {row['tokens_per_second']:.0f} | {row['peak_gib']:.2f} | {row['loss']:.4f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
