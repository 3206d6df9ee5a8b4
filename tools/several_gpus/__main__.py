"""Operators that are split over several GPUs beside one GPU, and a model under FSDP2: `python -m tools.several_gpus`.

Every rank is a process with a GPU of its own, and they talk through NCCL. Tables are printed, and kept with `--out`.
`--place cpu --tiny` tries the program on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from testing import ranks

WORKER = Path(__file__).with_name("worker.py")
Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(prog="several_gpus", description="Operators and a model on several GPUs.")
    parser.add_argument("--place", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the program")
    every = ",".join(MEASUREMENTS)
    parser.add_argument("--only", type=_names, default=every, help=f"some measurements, with commas: {every}")
    parser.add_argument("--out", type=Path, help="a file for the results, as JSON and as Markdown")
    options = parser.parse_args()
    if (reason := ranks.why_not(options.place, options.ranks)) is not None:
        print(f"Not run: {reason}.", file=sys.stderr)
        return 1
    size = "tiny" if options.tiny else "whole"
    said = ranks.run(WORKER, options.ranks, options.place, size, *options.only, timeout=600)
    results = json.loads(said[0].splitlines()[-1])
    results["ranks"] = options.ranks
    print(tables(results))
    if options.out:
        options.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(tables(results))
    return 0


def _names(text: str) -> list[str]:
    names = text.split(",")
    if wrong := [name for name in names if name not in MEASUREMENTS]:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is none of {', '.join(MEASUREMENTS)}")
    return names


def tables(results: dict[str, Any]) -> str:
    """Results as Markdown."""
    where = f"{results['device']}, {results['ranks']} ranks, torch {results['torch']}"
    lines = [f"{where}, {results['date']}. Wall time with the host's work."]
    for name, table in MEASUREMENTS.items():
        if name in results:
            lines += ["", *table(results[name])]
    return "\n".join(lines) + "\n"


def _operators(rows: Sequence[Row]) -> list[str]:
    def cells(row: Row) -> list[str]:
        return [f"{row['one']:.3f}", f"{row['all']:.3f}", f"{row['one'] / row['all']:.2f}"]

    header = ["tokens x width x vocabulary, forward and backward, ms", "one rank", "all ranks", "times as fast"]
    return _table(header, rows, cells)


def _training(title: str) -> Callable[[Sequence[Row]], list[str]]:
    def table(rows: Sequence[Row]) -> list[str]:
        profiled = [columns for columns in _PROFILED.items() if any(columns[0] in row for row in rows)]

        def cells(row: Row) -> list[str]:
            times = ["-" if row[key] is None else f"{row[key]:.1f}" for key, _ in profiled]
            return [f"{row['tokens_per_second']:.0f}", f"{row['peak_gib']:.2f}", f"{row['loss']:.4f}", *times]

        header = [title, "tokens/s", "peak GiB of a rank", "last loss", *(words for _, words in profiled)]
        return _table(header, rows, cells)

    return table


def _table(header: list[str], rows: Sequence[Row], cells: Callable[[Row], list[str]]) -> list[str]:
    """Lines of a table. A row that failed has its error in the first of its cells."""
    lines = [_line(header), "|" + "---|" * len(header)]
    for row in rows:
        found = [row["error"].replace("|", "\\|")] + [""] * (len(header) - 2) if "error" in row else cells(row)
        lines.append(_line([row["name"], *found]))
    return lines


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


# Of a profile, which older results lack.
_PROFILED = {
    "collectives_ms": "collectives, ms a step",
    "hidden_percent": "collectives hidden, %",
    "idle_ms": "nothing runs, ms a step",
}
MEASUREMENTS = {
    "operators": _operators,
    "training": _training("FSDP2"),
    "attn_res": _training("FSDP2, Attention Residuals in blocks"),
}


if __name__ == "__main__":
    raise SystemExit(main())
