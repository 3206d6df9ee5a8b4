"""What `check` says of executed calls: how much of each kernel was executed, and what its results were compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..check.execution import Executed, Ran

Key = tuple[str, str, str]  # a kernel, its tile and the toolchain


def cells(executed: Sequence[Executed]) -> dict[Key, str]:
    """The table's cell on execution."""
    return {key: _cell(launches) for key, launches in _by_key(executed).items()}


def lines(executed: Sequence[Executed]) -> Iterator[str]:
    """Instructions that no program issued, and sums over all calls."""
    final = [call for call in executed if call.toolchain]
    launches = [launch for call in final for launch in call.launches]
    total = left = 0
    for (kernel, tile, toolchain), of_one in _by_key(final).items():
        for instructions, unissued in _modules(of_one):
            total, left = total + instructions, left + len(unissued)
            if unissued:
                what = f"{len(unissued)} of {instructions} instructions issued by no program: {', '.join(unissued)}"
                yield f"{kernel} {toolchain}, {tile}: {what}"
    programs = f"{sum(launch.programs for launch in launches)} of {sum(launch.of for launch in launches)} programs"
    findings, partial = sum(len(call.findings) for call in executed), sum(bool(call.problem) for call in executed)
    yield (
        f"{len(final)} calls executed, {len(launches)} launches, {programs}, {findings} findings, "
        f"{f'{partial} calls not executed to their end' if partial else 'all calls executed to their end'}"
    )
    compared = sum(launch.compared for launch in launches)
    yield f"{compared} launches compared with their Linalg IR, {len(launches) - compared} with nothing"
    yield f"{total - left} of {total} instructions issued"
    raced = sum(launch.of for call in executed if not call.toolchain for launch in call.launches)
    yield f"races: {raced} programs, every one, from Linalg IR"
    kept = sum(call.kept for call in executed)
    if kept:
        yield f"{kept} verdicts are kept from before (--fresh executes the calls again)"


def _by_key(executed: Sequence[Executed]) -> Mapping[Key, Sequence[Ran]]:
    found: dict[Key, list[Ran]] = {}
    for call in executed:
        for launch in call.launches:
            found.setdefault((launch.kernel, launch.tile, call.toolchain), []).append(launch)
    return found


def _cell(launches: Sequence[Ran]) -> str:
    findings = sum(len(launch.findings) for launch in launches)
    if findings:
        return f"[red]{findings} findings[/red]"
    programs = f"{sum(launch.programs for launch in launches)} of {sum(launch.of for launch in launches)} programs"
    alone = sum(not launch.compared for launch in launches)
    return f"{len(launches)} launches, {programs}" + (f", [yellow]{alone} compared with nothing[/yellow]" if alone else "")


def _modules(launches: Sequence[Ran]) -> Iterator[tuple[int, list[str]]]:
    """For each final module of one tile: its number of instructions, and those that no launch issued.

    Launches of one tile have several modules where arguments are divisible by 16 in some of them alone.
    """
    for instructions in sorted({launch.instructions for launch in launches}):
        sets = [launch.unissued for launch in launches if launch.instructions == instructions]
        yield instructions, [name for name in sets[0] if all(name in other for other in sets)]
