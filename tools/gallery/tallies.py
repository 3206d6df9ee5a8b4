"""The part of the gallery's page with counts: calls of `count`, and tests of `suites`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

KINDS = ("failed", "WRONG", "refused", "not compiled", "finding", "right")
"""Of verdicts, the worst first."""
EXPLAINED = {
    "acos(u)": "acos of triton-ascend 3.2.0 is a polynomial that is wrong by 3e-4",
}
"""Calls with other values than PyTorch's, and why."""
_SOURCE = re.compile(r" at \d+:\d+: ")  # Triton's excerpt of a kernel's source follows
_Counts = Mapping[str, Mapping[str, Mapping[str, str]]]
_Suites = Mapping[str, Mapping[str, Mapping[str, object]]]

_HEAD = """## Counts: calls of packages

`python -m tools.gallery.count` calls {calls} operators in fp32 with small sizes, and their gradients where autograd has
any: from Linalg IR, looking for accesses out of bounds and races, and from the final module of CANN
9.1's compiler with all checks. Results are compared with PyTorch in fp64 (1e-4 of the largest element). A call counts once,
as the worse of its two levels. Liger's operators count twice: its kernels for GPUs, and those that it takes on an NPU.
flash-linear-attention's `chunk_delta_rule` takes no fp32 and is not counted.
**{right} of {calls} are right ({share:.0f} %).**

- **finding**: values may be right, and the compiled kernel reads outside of a tensor where
  triton-ascend does not turn a mask into a size, or breaks a rule of the checks.
- **not compiled**: the compiler says no; a smaller block, or another way to write the kernel, may help.
- **refused**: Triton 3.2.0 does not know what the kernel calls, or npu-offline cannot run the final module.
- **crash**: a traceback, a hang, or an error of the package's own code.
"""
_TABLE = """| package | calls | right | finding | not compiled | refused | other values | crash |
|---|---|---|---|---|---|---|---|"""
_SUITES = """## Counts: test suites of packages

Tests that the packages' authors wrote, with `pytest --npu-device emulated` from Linalg IR and no change to a file: tests of
Liger-Kernel's commit {liger} and of flash-linear-attention's {fla}, some chosen by size (`python -m tools.gallery.suites`).
The tests of layer_norm and poly_norm that fail are in bf16: results are farther from PyTorch's in bf16 than the tests allow.

| package | tests | passed | failed | refused | skipped by the suite |
|---|---|---|---|---|---|"""


def kind_of(verdict: str) -> str:
    """The kind that a verdict begins with."""
    return next(kind for kind in KINDS if verdict.startswith(kind))


def worst_of(levels: Mapping[str, str]) -> str:
    """The worst verdict of a call's levels."""
    return min(levels.values(), key=lambda verdict: KINDS.index(kind_of(verdict)))


def rendered(counts: _Counts, suites: _Suites, commits: Mapping[str, str]) -> str:
    """The part of the page.

    Args:
        counts: by package and call, the verdict of each level.
        suites: by package and file, how many tests had each outcome, and reasons.
        commits: by package, of the repository that the tests are from.
    """
    worst = {package: {call: worst_of(levels) for call, levels in calls.items()} for package, calls in counts.items()}
    everything = [verdict for calls in worst.values() for verdict in calls.values()]
    right = sum(kind_of(verdict) == "right" for verdict in everything)
    lines = [_HEAD.format(calls=len(everything), right=right, share=100 * right / len(everything)), _TABLE]
    lines += [_row(package, calls.values()) for package, calls in worst.items()]
    lines += [_row("all", everything), ""]
    for package, calls in worst.items():
        alike: dict[str, list[str]] = {}  # what several calls have in common stands once
        for call, verdict in calls.items():
            if kind_of(verdict) != "right":
                level = next(level for level, said in counts[package][call].items() if said == verdict)
                said = EXPLAINED.get(call, f"{_SOURCE.split(verdict.partition(': ')[2])[0]} ({level})")
                alike.setdefault(f"{kind_of(verdict).lower()}: {said}", []).append(f"`{call}`")
        lines += [f"- {package.partition(' ')[0]} {', '.join(each)}: {said}" for said, each in alike.items()]
    lines += ["", _SUITES.format(liger=commits["liger-kernel"], fla=commits["fla-core"])]
    reasons = []
    for package, files in suites.items():
        for file, found in files.items():
            name = file.rpartition("/")[2] + (f' `-k "{found["choice"]}"`' if "choice" in found else "")
            cells = [str(found.get(kind, 0)) for kind in ("passed", "failed", "refused", "skipped")]
            lines.append(f"| {package} | {name} | {' | '.join(cells)} |")
            why = found.get("why", [])
            reasons += [f"- {file.rpartition('/')[2]}: {reason}" for reason in (why if isinstance(why, list) else [])]
    return "\n".join([*lines, "", *reasons]) + "\n"


def _row(name: str, verdicts: Iterable[str]) -> str:
    kinds = [kind_of(verdict) for verdict in verdicts]
    columns = ("right", "finding", "not compiled", "refused", "WRONG", "failed")
    return f"| {name} | {len(kinds)} | {' | '.join(str(kinds.count(kind)) for kind in columns)} |"
