"""What compute-sanitizer printed, by kernel."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

_MARK = "========= "
# Ours are plain names; those of C++ kernels have a signature.
OURS = r"^[a-z][a-z_]*_kernel$"
_PLACE = re.compile(r"\bat (.+?)\+0x[0-9a-f]+")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (.*)")
_IGNORED = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY", "Warning: ", "LEAK SUMMARY", "Target application")


class Findings(NamedTuple):
    """Of one run under one tool.

    Attributes:
        ours: how often what was said, by kernel of ours.
        others: the same of kernels of other libraries, and of what names no kernel.
        summaries: the tool's own last lines; none where it did not come to an end.
    """

    ours: Counter[str]
    others: Counter[str]
    summaries: list[str]


def read(text: str) -> Findings:
    """The findings in what a tool printed."""
    found = Findings(Counter(), Counter(), [])
    record: list[str] = []

    def finish() -> None:
        if record:
            place = next((match[1] for line in record if (match := _PLACE.search(line))), "")
            name = place.split("(")[0].split("<")[0].strip()
            where = found.ours if re.match(OURS, name) else found.others
            also = [line.strip() for line in record[1:] if line.lstrip().startswith("and ")]  # the other side of a race
            said = re.sub(r"0x[0-9a-f]+", "ADDRESS", " ".join([record[0], *also]))
            where[f"{name or 'no kernel'}: {said}"] += 1
        record.clear()

    for line in text.splitlines():
        if not line.startswith(_MARK.rstrip()):
            continue
        said = line[len(_MARK) :]
        summary = _SUMMARY.match(said)
        if summary:
            finish()
            found.summaries.append(summary[1])
        elif not said.strip() or said.startswith(_IGNORED) and "Race" not in said:
            finish()
        elif not said.startswith(" "):
            finish()
            record.append(said)
        elif record:
            record.append(said)
    finish()
    return found
