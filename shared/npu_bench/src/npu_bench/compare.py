"""Two versions, or two histories, side by side."""

from __future__ import annotations

from pathlib import Path

from .errors import BenchError
from .records import Key, Point, load, points, versions
from .tables import Table, number

_HEADERS = ("case", "mode", "provider", "metric", "verdict", "before", "after", "after / before")


def chosen_version(source: str) -> tuple[str, str]:
    """The file and the version that `FILE` (its latest version) or `FILE@VERSION` names.

    Raises:
        BenchError: there is no such file or version.
    """
    name, _, version = source.partition("@")
    records = load(Path(name))
    known = versions(records)
    if not known:
        raise BenchError(f"{name} has no records.")
    version = version or known[-1]
    if version not in known:
        raise BenchError(f"{name} has no version {version}: it has {', '.join(known)}.")
    return name, version


def compare(before: str, after: str) -> Table:
    """Every point that both have.

    Faster or slower (less or more) is said where the ranges from the 20th to the 80th percentile do not overlap.

    Args:
        before, after: as for `chosen_version`.

    Raises:
        BenchError: they have no point in common.
    """
    (old_file, old_version), (new_file, new_version) = chosen_version(before), chosen_version(after)
    old, new = points(load(Path(old_file)), old_version), points(load(Path(new_file)), new_version)
    common = [key for key in new if key in old]
    if not common:
        raise BenchError(f"{before} and {after} have no point in common: same kernel, device, case, mode and provider.")
    rows = [_cells(key, old[key], new[key]) for key in common]
    return Table(f"{old_version} -> {new_version}", _HEADERS, rows, labels=5)


def _cells(key: Key, old: Point, new: Point) -> list[str]:
    ratio = f"{new.p50 / old.p50:.2f}" if old.p50 and new.p50 is not None else "-"
    return [
        f"{key.kernel} {key.x}",
        key.mode,
        key.provider,
        f"{key.metric}, {key.unit}",
        _verdict(old, new),
        number(old.p50),
        number(new.p50),
        ratio,
    ]


def _verdict(old: Point, new: Point) -> str:
    if new.p50 is None or new.p20 is None or new.p80 is None:
        return "no right result" if old.p50 is None else "BROKEN"
    if old.p50 is None or old.p20 is None or old.p80 is None:
        return "works now"
    if new.p80 < old.p20:
        return "less"
    if new.p20 > old.p80:
        return "MORE"
    return "same"
