"""Launches whose programs are executed from their TTIR, in place of the Linalg IR or beside it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import EndlessLoopError, Finding, OfflineError, OutOfBoundsError, UnsupportedError
from ...launches import LaunchRecord
from ...toolchain.compilation import front_end_of
from .. import settings
from ..faults import FRONT_END_IS_WRONG
from ..final.compare import Bounds, bytes_at
from ..storage import bounds_of
from .compare import unlike

if TYPE_CHECKING:
    from .memory import Memory
    from .programs import Meaning

SECONDS = 60
"""The processor time that the programs of a launch may take together."""
texts: list[str] = []
"""The TTIR of each kernel that Triton has loaded, by its handle."""
DTYPES = {
    "fp64": "float64",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    **{f"{sign}{bits}": f"{kind}{bits}" for sign, kind in (("i", "int"), ("u", "uint")) for bits in (8, 16, 32, 64)},
    "i1": "bool",
    "u1": "bool",
}


@functools.lru_cache(maxsize=64)
def _meaning_of(name: str, ttir: str) -> Meaning:
    from .programs import Meaning  # needs numpy and xDSL

    return Meaning(name, ttir)


def pointers_of(types: Mapping[str, str], values: Sequence[Any]) -> dict[str, Any]:
    """The pointer arguments of a launch by name."""
    return {name: value for (name, kind), value in zip(types.items(), values, strict=True) if kind.startswith("*")}


def execute(
    name: str,
    ttir: str,
    grid: tuple[int, int, int],
    types: Mapping[str, str],
    values: Sequence[Any],
    memory: Memory,
    other: bool,
) -> None:
    """Execute the programs of a launch; what they store is in the memory.

    Args:
        name: the kernel's.
        ttir: its TTIR.
        grid: of the launch.
        types: Triton type by name of its arguments, constants left out.
        values: of these arguments.
        memory: of its pointers.
        other: executes them in fp64 but for sums of fp32, in reverse order, with other numbers where Triton leaves one
            undefined.
    """
    import time

    scalars = {key: value for (key, kind), value in zip(types.items(), values, strict=True) if not kind.startswith("*")}
    started = time.process_time()
    with settings.clock.launch(f"kernel {name}, its TTIR, {grid[0] * grid[1] * grid[2]} programs") as late:

        def is_late() -> bool:
            return bool(late.value) or time.process_time() - started > SECONDS

        _meaning_of(name, ttir).execute(grid, scalars, list(types), memory, other=other, late=is_late)


def copies_of(types: Mapping[str, str], values: Sequence[Any]) -> dict[Bounds, Any]:
    """The bytes of the storages of a launch's arguments."""
    bounds = [bounds_of(value) for value in pointers_of(types, values).values()]
    found = {pair for each in bounds for pair in zip(each[::2], each[1::2], strict=True) if pair[1] > pair[0]}
    return {pair: bytes_at(*pair).clone() for pair in found}


def unlike_meaning(
    record: LaunchRecord, types: Mapping[str, str], values: Sequence[Any], before: Mapping[Bounds, Any], failed: str = ""
) -> list[Finding]:
    """How a launch that has run differs from what its TTIR means; empty also where the TTIR cannot be executed.

    Args:
        record: the launch.
        types: Triton type by name of its arguments, constants left out.
        values: of these arguments, after the launch.
        before: what `copies_of` returned before it.
        failed: why the launch stopped; empty if it did not.
    """
    from .memory import Memory

    pointers = pointers_of(types, values)
    _, ttir, _ = front_end_of(record)

    def meant_by(*, other: bool) -> Memory:
        memory = Memory(pointers, before)
        execute(record.name, ttir, record.grid, types, values, memory, other)
        return memory

    try:
        meant = meant_by(other=False).copy()
    except (UnsupportedError, EndlessLoopError):
        return []
    except OutOfBoundsError as error:
        return [] if failed else [Finding("meaning", None, f"as Triton defines it: {error}")]
    if failed:
        return [Finding("meaning", None, f"its TTIR, executed as Triton defines it, does not: {FRONT_END_IS_WRONG}")]
    moved = functools.lru_cache(maxsize=1)(lambda: _moved(meant_by, meant))
    found = []
    for name, kind in types.items():
        if not kind.startswith("*"):
            continue
        bounds = bounds_of(pointers[name])
        for pair in zip(bounds[::2], bounds[1::2], strict=True):
            if pair not in before:
                continue
            got, wanted = (_typed(each, kind) for each in (bytes_at(*pair), meant[pair]))
            said = unlike(name, got, wanted, lambda pair=pair, kind=kind: _typed(moved()[pair], kind))  # type: ignore[misc]
            if said:
                found.append(
                    Finding("meaning", None, f"{said}, which its TTIR means as Triton defines it: {FRONT_END_IS_WRONG}")
                )
    return found


def _moved(meant_by: Callable[..., Memory], meant: Mapping[Bounds, Any]) -> Mapping[Bounds, Any]:
    try:
        return meant_by(other=True).copy()
    except OfflineError:  # a number that is undefined may be an address
        return meant


def _typed(data: Any, kind: str) -> Any:
    import torch

    dtype = getattr(torch, DTYPES[kind[1:]])
    if dtype in (torch.uint16, torch.uint32, torch.uint64):
        dtype = getattr(torch, f"int{8 * dtype.itemsize}")
    if dtype == torch.bool:
        dtype = torch.uint8
    return data[: data.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
