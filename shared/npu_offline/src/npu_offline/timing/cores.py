"""The cores that run a launch's programs, and what each of them is issued."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import UnsupportedError
from ..launches import LaunchRecord, Memory
from ..module.operations import Pipe
from ..toolchain.opt import parse_stage
from .core import Rates
from .costs import ChipCosts
from .counting import Count, count
from .program import Issue, Program, needs_cube_cores, translate
from .registers import vector_functions
from .scalars import UNKNOWN

Cores = Mapping[str, tuple[Program, int]]
"""By the name of a core, as in `Event`: the program that it runs, and its number among the vector cores of a cube core."""


def cores_of(programs: tuple[Program, ...]) -> Cores:
    """Which core runs which program."""
    if len(programs) == 1:
        return {programs[0].core: (programs[0], 0)}
    by_core = {program.core: program for program in programs}
    return {"AIC": (by_core["AIC"], 0), "AIV0": (by_core["AIV"], 0), "AIV1": (by_core["AIV"], 1)}


def counts_of(cores: Cores, launch: LaunchRecord, number: int) -> list[Count]:
    """What one program of the grid issues, core by core."""
    seen: set[Any] = set()
    return [count(issues_of(name, cores, launch, number), seen) for name in cores]


def rates_of(name: str, costs: ChipCosts) -> Rates:
    """The rates of a core by its name."""
    ports: dict[Pipe, float] = {"MTE2": costs.typical_load_port, "MTE3": costs.typical_store_port}
    if name == "AIC" and costs.cube is not None:
        ports = {"MTE2": costs.cube.typical_load_port, "FIX": costs.store_port}
    return Rates(
        cycle=costs.cycle,
        issue=costs.issue * costs.cycle,
        start=costs.transfer_start,
        latency=costs.transfer_latency,
        memory_latency=costs.memory_latency,
        ports=ports,
    )


def issues_of(name: str, cores: Cores, launch: LaunchRecord, number: int) -> Iterator[Issue]:
    """What the scalar unit of a core issues for one program of the grid."""
    program, sub_block = cores[name]
    values = launch.arguments

    def element(name: str, index: Any) -> Any:
        memory = values.get(name)
        if index is UNKNOWN or not isinstance(memory, Memory) or memory.values is None:
            return UNKNOWN
        return int(memory.values.view(-1)[index])

    scalars = [value for value in values.values() if not isinstance(value, Memory)]
    return program.run(number, sub_block, *launch.grid, element, *scalars)


@functools.lru_cache(maxsize=64)
def programs_of(
    final: str, types: tuple[tuple[str, str], ...], soc: str, toolchain: str, costs: ChipCosts, rare: bool
) -> tuple[Program, ...]:
    """The programs of a final module.

    Raises:
        UnsupportedError: it needs cube cores whose costs are not known, or has an operation without a cost.
    """
    module = parse_stage(final, soc, toolchain)
    if costs.cube is None and needs_cube_cores(module):
        raise UnsupportedError(f"soc is {soc}, must be a chip whose cube cores' costs are known: the kernel needs them")
    functions = vector_functions(module, costs, rare=rare) if costs.registers else {}
    return translate(module, dict(types), costs, functions, rare=rare)
