"""The calls that `count` counts, from counted.txt."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

_FILE = Path(__file__).with_name("counted.txt")


class Counted(NamedTuple):
    """A call, the module that has the first of its names, and what PyTorch computes."""

    module: str
    call: str
    expected: str


def _read(text: str) -> dict[str, list[Counted]]:
    packages: dict[str, list[Counted]] = {}
    for part in re.split(r"^\[", text, flags=re.MULTILINE)[1:]:
        names, lines = part.split("]\n", 1)
        package, module = names.split()
        calls = packages.setdefault(package, [])
        for each in filter(None, re.split(r" \| |\n", lines)):
            call, arrow, expected = each.partition(" => ")
            calls.append(Counted(module, call, expected if arrow else call))
    calls = packages["liger-kernel"]
    calls += [each._replace(call=re.sub(r"^[a-z_.]+(?=Liger)", "", each.call)) for each in calls]
    return packages


PACKAGES = _read(_FILE.read_text())
"""The calls of each distribution."""
