"""What Triton calls at each launch: one object per compiled kernel, which runs or records it."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .errors import Finding, FindingsError, OfflineError
from .execute.checked import check
from .execute.findings import FINDING_BYTES, raise_findings, read_findings
from .faults import RESERVED, Fault, fault_of
from .launches import Emulation, Launch, LaunchRecord, Ledger, Memory, Traffic
from .races import written_alike
from .storage import bounds_of, bytes_of, row_bytes, storage_of

if TYPE_CHECKING:
    import torch

MAX_PROGRAMS = 65535
_MOST_KEPT = 2**22  # bytes of a tensor of integers that a record keeps: indices, offsets
_LENGTHS = 40  # powers of two that transfers are counted by, as in launch.h
_TRAFFIC, _USE = len(Traffic.__dataclass_fields__), 4
_COUNTERS = _TRAFFIC + _USE + _LENGTHS
_WATCH_USE, _WATCH_RACES = 1, 2  # as in launch.h
_NOT_A_NUMBER = 0xFF  # bytes of a core's memory that nobody has written
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


class RunningEmulation(Emulation):
    """An emulation in force, with how it runs its launches."""

    def __init__(
        self,
        soc: str,
        toolchain: str,
        threads: int,
        shuffle: int | None,
        *,
        races: bool = False,
        ledgers: bool = False,
        checks: bool = False,
        ends: bool = False,
        keep_going: bool = False,
    ) -> None:
        super().__init__(soc, toolchain)
        self.checks, self.ends, self.keep_going = checks, ends, keep_going
        self.ledgers = ledgers
        self._settings = (threads, shuffle is not None, (shuffle or 0) & (2**64 - 1))
        self.watching = _WATCH_USE * ledgers + _WATCH_RACES * races

    def settings(self, unit_bits: int, shared: int, *, checks: bool, poison: int, chosen: Any) -> bytes:
        """As the runtime takes them: with the size of a unit, which arguments several programs may write,
        and the numbers of the only programs to run, if there are any.

        Programs that are checked run one after another, so that atomic updates come in the same order every time.
        """
        threads, *order = self._settings
        return _SETTINGS.pack(
            1 if self.checks else threads,
            *order,
            self.watching,
            unit_bits,
            shared,
            checks,
            poison,
            ctypes.addressof(chosen),
            len(chosen),
        )


_SETTINGS = struct.Struct("<qqQqqqqqQq")
running: list[RunningEmulation] = []
recordings: list[list[LaunchRecord]] = []


class _Arguments:
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

    def __init__(self, source: Any, metadata: Any) -> None:
        from .native import runtime

        self._run = runtime().npu_offline_launch
        self._arguments = _Arguments(source)
        kinds = self._arguments.types.values()
        formats = ("QQqqq" if kind.startswith("*") else _SCALARS[kind] for kind in kinds)
        self._slots = struct.Struct("<" + "QQqqq" * RESERVED + "".join(formats) + "i4xi4xi4x")
        self._count = RESERVED + len(self._arguments.pointers)
        self._ranges = struct.Struct(f"<{2 * self._count}Q")
        self._row_bytes = struct.Struct(f"<{self._count}q")
        self._unit_bits = min((bytes_of(kind) for kind in kinds if kind.startswith("*")), default=1).bit_length() - 1

    @functools.cached_property
    def _shared(self) -> int:
        """A bit for each argument that several programs may write alike."""
        alike = written_alike(self._arguments.kernel)
        return sum(1 << i for i, name in enumerate(self._arguments.pointers, RESERVED) if name in alike)

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
        from .native import loaded

        emulation = running[-1]
        grid = (grid_x, grid_y, grid_z)
        _check_grid(self._arguments.name, grid)
        binary = loaded[function]
        workspace = (ctypes.c_char * (binary.workspace * grid_x * grid_y * grid_z))()
        low, size = ctypes.addressof(workspace), len(workspace)
        slots: list[Any] = [0] * (5 * (RESERVED - 1)) + [low, low, 0, size, 1]
        ranges = [0] * (2 * (RESERVED - 1)) + [low, low + size]
        rows = [0] * RESERVED
        storages: list[int] = []
        bases = []
        kept = [value for value, keep in zip(values, self._arguments.kept, strict=True) if keep]
        for (name, kind), value in zip(self._arguments.types.items(), kept, strict=True):
            if kind.startswith("*"):
                address, low, high = storage_of(name, value)
                slots += (address, address, 0, high - low, 1)
                ranges += (low, high)
                bases.append(address)
                rows.append(row_bytes(value) if emulation.ledgers else 0)
                if emulation.watching:
                    storages += bounds_of(value)
            else:
                slots.append(value)
        counters = (ctypes.c_int64 * (_COUNTERS * self._count))()
        shared = self._shared if emulation.watching else 0
        found = ctypes.create_string_buffer(FINDING_BYTES)
        last = grid_x * grid_y * grid_z - 1
        ends = sorted({0, last // 2, last}) if emulation.ends and last > 0 else []
        chosen = (ctypes.c_uint32 * len(ends))(*ends)

        def run(address: int, *, checks: bool = False, poison: int = _NOT_A_NUMBER) -> None:
            fault = (ctypes.c_int64 * 10)()
            ctypes.memset(counters, 0, ctypes.sizeof(counters))
            failed = self._run(
                ctypes.c_void_p(address),
                self._slots.pack(*slots, *grid),
                self._ranges.pack(*ranges),
                self._row_bytes.pack(*rows),
                ctypes.c_int64(self._count),
                (ctypes.c_uint64 * len(storages))(*storages),
                ctypes.c_int64(len(storages) // 2),
                (ctypes.c_int32 * 3)(*grid),
                emulation.settings(self._unit_bits, shared, checks=checks, poison=poison, chosen=chosen),
                counters,
                fault,
                found,
            )
            if failed:
                raise_findings(self._arguments.name, found.value)
                raise fault_of(failed, Fault(*fault), self._arguments.name, self._arguments.pointers, bases, ranges, grid)

        def traffic_of() -> dict[str, Traffic]:
            firsts = {name: _COUNTERS * i for i, name in enumerate(self._arguments.pointers, RESERVED)}
            return {name: Traffic(*counters[first : first + _TRAFFIC]) for name, first in firsts.items()}

        def written() -> dict[str, int]:
            return {name: traffic.written for name, traffic in traffic_of().items()}

        if enter is not None:
            enter(launch_metadata)
        notes: list[Finding] = []
        try:
            if emulation.checks:
                name, types = self._arguments.name, self._arguments.types
                notes = check(name, types, kept, binary, run, lambda: read_findings(found.value), written)
            else:
                run(function)
        except FindingsError as error:
            if not emulation.keep_going:
                raise
            notes = list(error.findings)
        finally:
            if leave is not None:
                leave(launch_metadata)
        ledgers = {}
        for position, name in enumerate(self._arguments.pointers, RESERVED):
            first = _COUNTERS * position
            if emulation.ledgers:
                ledgers[name] = _ledger(counters[first + _TRAFFIC : first + _COUNTERS])
        emulation.launches.append(
            Launch(self._arguments.name, grid, self._arguments.constants, traffic_of(), ledgers, notes)
        )


class Recorder:
    """Notes a launch; stands where `Launcher` does."""

    def __init__(self, source: Any, metadata: Any) -> None:
        from .frontend import changed_options

        self._changed_options = changed_options
        self._source = source
        self._options = metadata
        self._arguments = _Arguments(source)

    def __call__(
        self,
        grid_x: int,
        grid_y: int,
        grid_z: int,
        stream: Any,
        function: Any,
        packed: Any,
        launch_metadata: Any,
        enter: Any,
        leave: Any,
        *values: Any,
    ) -> None:
        source = self._source
        grid = (grid_x, grid_y, grid_z)
        _check_grid(source.fn.__name__, grid)
        kept = (value for value, keep in zip(values, self._arguments.kept, strict=True) if keep)
        divisible = [source.fn.arg_names[i] for i in source.attrs.arg_properties.get("tt.divisibility", ())]
        recordings[-1].append(
            LaunchRecord(
                kernel=source.fn,
                name=source.fn.__name__,
                signature=dict(source.signature),
                constants=dict(source.constants),
                grid=grid,
                options=self._changed_options(self._options),
                divisible=tuple(divisible),
                arguments={name: _noted(value) for name, value in zip(self._arguments.types, kept, strict=True)},
            )
        )


def _noted(value: Any) -> Memory | int | float:
    """A recorded argument; floats and large tensors by their size alone, so that a record keeps little memory alive."""
    if isinstance(value, (bool, int, float)):
        return value
    tensor: torch.Tensor = getattr(value, "base", value)
    if not hasattr(tensor, "shape"):  # it stands for several tensors
        bounds = bounds_of(value)
        return Memory(sum(bounds[1::2]) - sum(bounds[::2]))
    integers = not tensor.is_floating_point() and tensor.is_contiguous()
    return Memory(tensor.numel() * tensor.itemsize, tensor if integers else None, row_bytes(tensor))


def _check_grid(kernel: str, grid: tuple[int, int, int]) -> None:
    programs = grid[0] * grid[1] * grid[2]
    if programs > MAX_PROGRAMS:
        raise OfflineError(f"the grid of kernel {kernel} has {programs} programs, must be at most {MAX_PROGRAMS}")


def _ledger(counters: Sequence[int]) -> Ledger:
    pieces, whole_rows, useful_read, useful_written, *lengths = counters
    return Ledger(
        useful_read, useful_written, pieces, whole_rows, {1 << i: count for i, count in enumerate(lengths) if count}
    )
