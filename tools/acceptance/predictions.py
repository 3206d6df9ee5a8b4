"""What the time model says of the sizes that are timed: `python -m tools.acceptance.predictions` writes predicted.json.

Made beforehand, because the model was run on x86-64 alone, and machines with a chip mostly are aarch64.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("predicted.json")
_TOOLCHAIN = "1.2.0"
Times = dict[str, dict[str, dict[str, float]]]


def predict(operators: list[str] | None = None) -> Times:
    """Milliseconds on the device by operator, mode and size; of these operators (all)."""
    from tools.compare.results import results

    times: Times = {}
    for result in results(operators, _TOOLCHAIN):
        if result.whose == "ours":
            if result.problem:
                raise RuntimeError(f"{result.row.operator} of {result.row.size}: {result.problem}")
            mode = times.setdefault(result.row.operator, {}).setdefault(result.row.direction, {})
            mode[str(result.row.size)] = round(result.predicted * 1e3, 5)
    return times


def load() -> dict[str, Any]:
    """What the file has: the chip, the compiler, the date, and the times."""
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def main() -> None:
    """Write the file."""
    from tools.compare.published import SOC

    about = {"soc": SOC, "toolchain": _TOOLCHAIN, "date": datetime.datetime.now(datetime.UTC).date().isoformat()}
    FILE.write_text(json.dumps({**about, "times": predict()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
