"""The gallery's page, from what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from npu_offline import VERSIONS

from ..workspace import ROOT
from .calls import ENTRIES, Entry
from .sources import TITLES

PAGE = ROOT / "shared" / "npu_offline" / "GALLERY.md"
_CANN = dict(zip(VERSIONS, ("8.5", "9.0", "9.1"), strict=True))
_BANDWIDTH = 0.8e12  # bytes a second

_HEAD = """# Gallery: kernels from the wild

Kernels of other projects, called as those projects call them, through npu-offline, as on an Ascend910B4. Nothing here ran
on a chip. Made on {dates} by `python -m tools.gallery`, with triton-ascend 3.2.0 and the compilers of
CANN 8.5 (1.0.0), 9.0 (1.1.0) and about 9.1 (1.2.0).

- **compiles**: the largest share of the Unified Buffer that a launch of the call takes, with the compiler of CANN 8.5,
  9.0 and 9.1; one number where all are equal; "no" where a launch does not fit.
- **computes**: the whole call, run from Linalg IR and from each compiler's final module; the largest error against
  PyTorch in fp64, as a share of the largest element. Right is at most 1e-5 in fp32, .002 in fp16, .016 in bf16. The run
  from Linalg IR also looks for races between programs and for accesses out of bounds: none was found in these calls.
- **bytes**: moved from and to global memory (Linalg IR), over the bytes of all inputs and outputs once. Less than 1: a
  part of a tensor is not needed. Scalars are accesses to single elements.
- **time**: predicted by the time model for CANN 9.1's compiler, launches included, over the minimum of bytes at
  .8 TB/s. Not measured.
- **lint**: rules that launches break (CANN 9.1's compiler), and how often.

Results that differ by roundings of bf16: the compilers leave roundings out, CANN 8.5's
those of casts, and all three those of arithmetic in bf16 (COMPILER_FAULTS.md), such as the product in dw of Liger's rms_norm
backward. There the final modules are closer to fp64 than the Linalg IR: a root mean square error of
.106 instead of .132 in dw. The race in solve_tril: with CANN 9.0, both vector cores of a program compute and store the same
bytes; the results are right here.
"""


def rendered(rows: Mapping[str, Mapping[str, Any]], tallied: str) -> str:
    """The page.

    Args:
        rows: by source and name, the fields of `measure.Row` and the date.
        tallied: the part with counts.
    """
    dates = sorted({row["date"] for row in rows.values()})
    parts = [_HEAD.format(dates=" and ".join(dates)), tallied]
    for source, title in TITLES.items():
        own = [(entry, rows[f"{source} {entry.name}"]) for entry in ENTRIES if f"{source} {entry.name}" in rows]
        own = [(entry, row) for entry, row in own if entry.source == source]
        if own:
            lines = [_line(entry, row) for entry, row in own]
            table = ["| call | compiles | computes | bytes | time | lint |", "|---|---|---|---|---|---|", *lines]
            alike: dict[str, list[str]] = {}
            for entry, row in own:
                for note in _notes(row):
                    alike.setdefault(note, []).append(entry.name)
            notes = [f"- {'; '.join(names)}: {note}" for note, names in alike.items()]
            parts.append(
                "\n".join([f"## {title[0].upper()}{title[1:]}", "", *table, *([""] if notes else []), *notes]) + "\n"
            )
    return "\n".join(parts)


def _line(entry: Entry, row: Mapping[str, Any]) -> str:
    lint = ", ".join(f"{rule} {count}" if count > 1 else rule for rule, count in sorted(row["lint"].items()))
    cells = [f"{entry.name}, {entry.sizes}", _compiles(row), _computes(row), _bytes(row), _time(row), lint or "nothing"]
    if not row["compiles"]:
        cells[1:] = ["not loaded", "", "", "", ""]
    return f"| {' | '.join(cells)} |"


def _compiles(row: Mapping[str, Any]) -> str:
    found = {_CANN[version]: text for version, text in row["compiles"].items()}
    shares = [text.removeprefix("yes, ") for text in found.values()]
    if all(text.startswith("yes") for text in found.values()):
        return shares[0] if len(set(shares)) == 1 else " / ".join(shares)
    return ", ".join(
        f"{cann} {'no' if text.startswith('no') else text.removeprefix('yes, ')}" for cann, text in found.items()
    )


def _computes(row: Mapping[str, Any]) -> str:
    """One verdict where all levels agree, else each."""
    verdicts = {level: text.partition(":")[0].partition(",")[0] for level, text in row["results"].items()}
    errors = [text.partition(", ")[2] for text in row["results"].values() if text.startswith(("right", "WRONG"))]
    worst = max(errors, key=float, default="")
    if len(set(verdicts.values())) == 1:
        return f"{next(iter(verdicts.values()))}, {worst}" if worst else next(iter(verdicts.values()))
    named = {_CANN.get(level, level): verdict for level, verdict in verdicts.items()}
    return ", ".join(f"{level}: {verdict}" for level, verdict in named.items()) + (f"; {worst}" if worst else "")


def _bytes(row: Mapping[str, Any]) -> str:
    if row["moved"] is None or not row["minimum"]:
        return ""
    scalars = f", {row['scalars']} scalars" if row["scalars"] else ""
    return f"{row['moved'] / row['minimum']:.2f}{scalars}"


def _time(row: Mapping[str, Any]) -> str:
    if row["predicted"] is None or not row["minimum"]:
        return ""
    floor = row["minimum"] / _BANDWIDTH
    return f"{row['predicted'] * 1e6:.0f} µs, {row['predicted'] / floor:.1f} of the floor"


def _notes(row: Mapping[str, Any]) -> Iterator[str]:
    """What the table has no room for; one line for each different text."""
    seen: dict[str, list[str]] = {}
    for version, text in row["compiles"].items():
        if text.startswith("no"):
            seen.setdefault(f"does not compile: {text.removeprefix('no: ')}", []).append(_CANN[version])
    refused = {version for version, text in row["compiles"].items() if text.startswith("no")}
    for level, text in row["results"].items():
        if text.startswith("not run") and level not in refused:
            seen.setdefault(text, []).append(_CANN.get(level, level))
    for version, text in row["findings"].items():
        if text != "none" and version not in refused and text not in row["results"].values():
            seen.setdefault(f"findings of the checks: {text}", []).append(_CANN[version])
    for text, levels in seen.items():
        where = [level if level == "Linalg IR" else f"CANN {level}" for level in levels]
        yield f"{', '.join(where)}: {text}."
    if row["time_problem"]:
        later = ", which later releases of triton-ascend than 3.2.0 have" if _is_later(row["time_problem"]) else ""
        yield f"{row['time_problem']}{later}."


def _is_later(problem: str) -> bool:
    """Whether a module or an option is missing in triton-ascend 3.2.0 that its repository has at eeb030e."""
    return "triton.language.extra.cann" in problem or "enable_ubuf_saving" in problem
