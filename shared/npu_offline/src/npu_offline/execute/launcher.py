"""Runs launches: Triton makes one `Launcher` for each compiled kernel, and calls it at each launch."""

from __future__ import annotations

import ctypes
import functools
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import EndlessLoopError, Finding, FindingsError, OfflineError, OutOfBoundsError, RaceError, reported
from ..launches import MAX_PROGRAMS, RESERVED, Access, Launch, LaunchRecord, Ledger, Memory, Traffic
from . import settings
from .faults import Fault, fault_of
from .final.checked import PLAIN, SURVEYED, check
from .final.compare import bytes_at
from .final.findings import FINDING_BYTES, raise_findings, read_findings
from .meaning.launch import copies_of, execute, pointers_of, texts, unlike_meaning
from .races import shared_writes
from .settings import ACCESS_FIELDS, running
from .source_lines import LOAD, STORE, UPDATE, KernelSource
from .storage import bounds_of, bytes_of, row_bytes, storage_of, tensor_of

_LENGTHS = 40  # classes of transfers by length, powers of two, as in launch.h
_MOST_ACCESSES = 20_000  # of a launch that are noted: more than a picture can show
_TRAFFIC, _USE = len(Traffic.__dataclass_fields__), 4
_COUNTERS = _TRAFFIC + _USE + _LENGTHS
_NOT_A_NUMBER = 0xFF  # bytes of a core's memory that nobody has written
_KINDS = {OutOfBoundsError: "bounds", RaceError: "programs", EndlessLoopError: "endless"}  # of findings
_NUMBERED = re.compile(r"\bargument (\d+)\b")  # in what views.c writes
_SCALARS = {  # Triton type to struct format, in a slot of 8 bytes
    "i1": "?7x",
    "i8": "b7x",
    "i16": "h6x",
    "i32": "i4x",
    "i64": "q",
    "u1": "?7x",
    "u8": "B7x",
    "u16": "H6x",
    "u32": "I4x",
    "u64": "Q",
    "fp16": "e6x",
    "fp32": "f4x",
    "fp64": "d",
}


def record_of(
    source: Any, options: Any, grid: tuple[int, int, int], arguments: dict[str, Memory | int | float]
) -> LaunchRecord:
    """A record of a launch of a compiled kernel."""
    from ..toolchain.frontend import changed_options

    return LaunchRecord(
        kernel=source.fn,
        name=source.fn.__name__,
        signature=dict(source.signature),
        constants=dict(source.constants),
        grid=grid,
        options=changed_options(options),
        divisible=tuple(source.fn.arg_names[i] for i in source.attrs.arg_properties.get("tt.divisibility", ())),
        arguments=arguments,
    )


class Arguments:
    """The run-time arguments of a compiled kernel: their names and types, in order, constants left out."""

    def __init__(self, source: Any) -> None:
        self.name: str = source.fn.__name__
        self.constants: Mapping[str, Any] = dict(source.constants)
        self.kept = [name not in self.constants for name in source.signature]
        self.types = {name: kind for name, kind in source.signature.items() if name not in self.constants}
        self.kernel = source.fn
        self.pointers = [name for name, kind in self.types.items() if kind.startswith("*")]


class Launcher:
    """Runs the programs of one compiled kernel; Triton makes one per kernel and calls it at each launch."""

    @reported
    def __init__(self, source: Any, metadata: Any) -> None:
        from .native import runtime

        self._run = runtime().npu_offline_launch
        self._source, self._options = source, metadata
        self._arguments = Arguments(source)
        kinds = self._arguments.types.values()
        formats = ("QQqqq" if kind.startswith("*") else _SCALARS[kind] for kind in kinds)
        self._slots = struct.Struct("<" + "QQqqq" * RESERVED + "".join(formats) + "i4xi4xi4x")
        self._count = RESERVED + len(self._arguments.pointers)
        self._ranges = struct.Struct(f"<{2 * self._count}Q")
        self._row_bytes = struct.Struct(f"<{self._count}q")
        self._unit_bits = min((bytes_of(kind) for kind in kinds if kind.startswith("*")), default=1).bit_length() - 1

    @functools.cached_property
    def _kernel_source(self) -> KernelSource:
        return KernelSource(record_of(self._source, self._options, (1, 1, 1), {}))

    @functools.cached_property
    def _shared(self) -> int:
        """A bit for each argument that several programs may write the same values to."""
        alike = shared_writes(self._arguments.kernel)
        return sum(1 << i for i, name in enumerate(self._arguments.pointers, RESERVED) if name in alike)

    def _named(self, text: str) -> str:
        """A finding with names of arguments in place of their numbers, and the lines that access the first."""
        names = dict(enumerate(("the locks", "the workspace", *(f"argument {name}" for name in self._arguments.pointers))))
        found = _NUMBERED.search(text)
        number = int(found[1]) if found else 0
        lines = ""
        if RESERVED <= number < len(names):
            name, source = self._arguments.pointers[number - RESERVED], self._kernel_source
            kinds = (STORE, UPDATE) if " writes " in text else (LOAD,)
            lines = next(filter(None, (source.lines(name, kind) for kind in kinds)), "")
        named = _NUMBERED.sub(lambda each: names.get(int(each[1]), each[0]), text)
        return f"{named} ({lines})" if lines else named

    def _unlike_meaning(
        self, grid: tuple[int, int, int], values: Sequence[Any], before: Mapping[Any, Any], failed: str = ""
    ) -> list[Finding]:
        return unlike_meaning(
            record_of(self._source, self._options, grid, {}), self._arguments.types, values, before, failed
        )

    @reported
    def __call__(
        self,
        grid_x: int,
        grid_y: int,
        grid_z: int,
        stream: Any,
        function: int,
        packed: Any,
        launch_metadata: Any,
        enter: Any,
        leave: Any,
        *values: Any,
    ) -> None:
        from .loading import loaded

        emulation = running[-1]
        grid = (grid_x, grid_y, grid_z)
        check_grid(self._arguments.name, grid)
        binary = loaded[function]
        workspace = (ctypes.c_char * (binary.workspace * grid_x * grid_y * grid_z))()
        locks = (ctypes.c_int64 * binary.locks)()
        slots: list[Any] = []
        ranges: list[int] = []
        for reserved in (locks, workspace):
            low, size = ctypes.addressof(reserved), ctypes.sizeof(reserved)
            slots += (low, low, 0, size, 1)
            ranges += (low, low + size)
        rows = [0] * RESERVED
        storages: list[int] = []
        bases, tensors = [], []
        kept = [value for value, keep in zip(values, self._arguments.kept, strict=True) if keep]
        for (name, kind), value in zip(self._arguments.types.items(), kept, strict=True):
            if kind.startswith("*"):
                address, low, high = storage_of(name, value)
                slots += (address, address, 0, high - low, 1)
                ranges += (low, high)
                bases.append(address)
                tensors.append(tensor_of(value))
                rows.append(row_bytes(value) if emulation.ledgers else 0)
                if emulation.watching or binary.locks:
                    storages += bounds_of(value)
            else:
                slots.append(value)
        counters = (ctypes.c_int64 * (_COUNTERS * self._count))()
        shared = self._shared if emulation.watching else 0
        found = ctypes.create_string_buffer(FINDING_BYTES)
        count = grid_x * grid_y * grid_z
        news = (ctypes.c_uint8 * count)()
        issued = (ctypes.c_uint8 * len(binary.instructions))()
        accesses = (ctypes.c_int64 * (1 + ACCESS_FIELDS * _MOST_ACCESSES * emulation.accesses))()
        programs: list[int] = []
        filled = {"news": news, "issued": issued, "accesses": accesses}

        def run(address: int, *, mode: int = PLAIN, poison: int = _NOT_A_NUMBER) -> None:
            chosen = (ctypes.c_uint32 * len(programs))(*programs)
            noted = (ctypes.c_int64 * 10)()
            watching = emulation.watching | settings.WATCH_LOCKS * bool(binary.locks and not programs)
            ctypes.memset(counters, 0, ctypes.sizeof(counters))
            if emulation.checks:  # on a chip it holds what launches before have left
                ctypes.memset(workspace, poison, len(workspace))
            with settings.clock.launch(f"kernel {self._arguments.name}, {count} programs") as late:
                failed = self._run(
                    ctypes.c_void_p(address),
                    self._slots.pack(*slots, *grid),
                    self._ranges.pack(*ranges),
                    self._row_bytes.pack(*rows),
                    ctypes.c_int64(self._count),
                    (ctypes.c_uint64 * len(storages))(*storages),
                    ctypes.c_int64(len(storages) // 2),
                    (ctypes.c_int32 * 3)(*grid),
                    emulation.settings(
                        watching, self._unit_bits, shared, mode=mode, poison=poison, chosen=chosen, late=late, **filled
                    ),
                    counters,
                    noted,
                    found,
                )
            if failed:
                raise_findings(self._arguments.name, found.value, self._named)
                names, where = self._arguments.pointers, (tensors, bases, ranges, grid)
                name = self._arguments.name
                seconds = f"{settings.PROGRAM_SECONDS} s of processor time"
                after = f"{settings.clock.limit:g} s, the limit" if late.value else seconds
                raise fault_of(failed, Fault(*noted), name, names, *where, after, self._kernel_source)

        def survey() -> None:
            programs[:] = dict.fromkeys([0, count - 1, *range(count)])  # the first and the last program are always run
            run(binary.address, mode=SURVEYED)
            programs[:] = [program for program in range(count) if news[program] or program in (0, count - 1)]

        def complete() -> None:
            chosen, programs[:] = list(programs), ()
            run(binary.address)
            programs[:] = chosen

        def traffic_of() -> dict[str, Traffic]:
            firsts = {name: _COUNTERS * i for i, name in enumerate(self._arguments.pointers, RESERVED)}
            return {name: Traffic(*counters[first : first + _TRAFFIC]) for name, first in firsts.items()}

        if enter is not None:
            enter(launch_metadata)
        notes: list[Finding] = []
        before = copies_of(self._arguments.types, kept) if emulation.meaning else {}
        try:
            if emulation.checks:
                name, types = self._arguments.name, self._arguments.types
                few = (survey, complete) if emulation.distinct and count > 1 else None
                notes = check(
                    name, types, kept, binary, run, lambda: read_findings(found.value, self._named), traffic_of, few
                )
            else:
                run(function)
                if emulation.meaning:
                    notes = self._unlike_meaning(grid, kept, before)
                    if notes and not emulation.keep_going:
                        raise FindingsError(self._arguments.name, notes)
        except FindingsError as error:
            if not emulation.keep_going:
                raise
            notes = list(error.findings)
        except tuple(_KINDS) as error:
            if not emulation.keep_going:
                raise
            notes = [Finding(_KINDS[type(error)], None, str(error))]
            if emulation.meaning and isinstance(error, OutOfBoundsError):
                notes += self._unlike_meaning(grid, kept, before, str(error))
        finally:
            if leave is not None:
                leave(launch_metadata)
        ledgers = {}
        for position, name in enumerate(self._arguments.pointers, RESERVED):
            first = _COUNTERS * position
            if emulation.ledgers:
                ledgers[name] = _ledger(counters[first + _TRAFFIC : first + _COUNTERS])
        of_checks: dict[str, Any] = {"ttir": self._kernel_source.text} if notes else {}
        if emulation.checks:
            unissued = [f"{name}#{i}" for i, name in enumerate(binary.instructions) if not issued[i]]
            of_checks |= {"compared": bool(binary.beside), "instructions": len(issued), "unissued": unissued}
            of_checks["accesses"] = _accesses(accesses, binary)
        name, types, constants = self._arguments.name, self._arguments.types, self._arguments.constants
        arguments = traffic_of()
        emulation.launches.append(
            Launch(name, grid, constants, arguments, ledgers, notes, tuple(programs), types, **of_checks)
        )


class MeaningLauncher:
    """Executes the programs of one kernel from its TTIR; results are in the arguments."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self._arguments = Arguments(source)

    @reported
    def __call__(self, x: int, y: int, z: int, stream: Any, function: int, *rest: Any) -> None:
        from .meaning.memory import Memory  # needs numpy

        emulation, grid, arguments = running[-1], (x, y, z), self._arguments
        check_grid(arguments.name, grid)
        values = rest[len(rest) - len(arguments.kept) :]
        kept = [value for value, keep in zip(values, arguments.kept, strict=True) if keep]
        memory = Memory(pointers_of(arguments.types, kept), races=emulation.meaning == "races")
        execute(arguments.name, texts[function], grid, arguments.types, kept, memory, emulation.meaning == "other")
        for bounds, data in memory.copy().items():
            bytes_at(*bounds).copy_(data)
        emulation.launches.append(Launch(arguments.name, grid, arguments.constants, {}, signature=arguments.types))


def _accesses(noted: Any, binary: Any) -> tuple[Access, ...]:
    """Accesses of the Unified Buffer from what accesses.c notes."""
    from ..module.operations import PIPES  # needs xdsl, which `import npu_offline` does not

    found = []
    for at in range(1, 1 + ACCESS_FIELDS * noted[0], ACCESS_FIELDS):
        step, number, pipe, core, buffer, low, high, writes = noted[at : at + ACCESS_FIELDS]
        instruction = f"{binary.instructions[number]}#{number}"
        found.append(Access(step, instruction, PIPES[pipe], core, binary.buffers[buffer], low, high, bool(writes)))
    return tuple(found)


def check_grid(kernel: str, grid: tuple[int, int, int]) -> None:
    programs = grid[0] * grid[1] * grid[2]
    if programs > MAX_PROGRAMS:
        raise OfflineError(f"the grid of kernel {kernel} has {programs} programs, must be at most {MAX_PROGRAMS}")


def _ledger(counters: Sequence[int]) -> Ledger:
    pieces, whole_rows, useful_read, useful_written, *lengths = counters
    return Ledger(
        useful_read, useful_written, pieces, whole_rows, {1 << i: count for i, count in enumerate(lengths) if count}
    )
