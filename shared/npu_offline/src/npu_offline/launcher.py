"""What Triton calls at each launch: one object per compiled kernel, which runs or records it."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .errors import OfflineError, OutOfBoundsError
from .launches import Emulation, Launch, LaunchRecord, Traffic

if TYPE_CHECKING:
    import torch

MAX_PROGRAMS = 65535
_RESERVED = 2  # the compiler puts two memrefs, the lock and the workspace, before a kernel's own arguments
_COUNTERS = len(Traffic.__dataclass_fields__)
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
_ACCESSES = ("read", "write", "atomic update")


class RunningEmulation(Emulation):
    """An emulation in force, with how it runs its launches."""

    def __init__(self, soc: str, toolchain: str, threads: int, shuffle: int | None) -> None:
        super().__init__(soc, toolchain)
        self.threads = threads
        self.shuffle = shuffle


running: list[RunningEmulation] = []
recordings: list[list[LaunchRecord]] = []


class _Arguments:
    """The run-time arguments of a compiled kernel: their names and types, in order, constants left out."""

    def __init__(self, source: Any) -> None:
        self.name: str = source.fn.__name__
        self.constants: Mapping[str, Any] = dict(source.constants)
        self.kept = [name not in self.constants for name in source.signature]
        self.types = {name: kind for name, kind in source.signature.items() if name not in self.constants}
        self.pointers = [name for name, kind in self.types.items() if kind.startswith("*")]


class Launcher:
    """Runs the programs of one compiled kernel; Triton makes one per kernel and calls it at each launch."""

    def __init__(self, source: Any, metadata: Any) -> None:
        from .native import runtime

        self._run = runtime().npu_offline_launch
        self._arguments = _Arguments(source)
        kinds = self._arguments.types.values()
        formats = ("QQqqq" if kind.startswith("*") else _SCALARS[kind] for kind in kinds)
        self._slots = struct.Struct("<" + "QQqqq" * _RESERVED + "".join(formats) + "i4xi4xi4x")
        self._count = _RESERVED + len(self._arguments.pointers)
        self._ranges = struct.Struct(f"<{2 * self._count}Q")

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
        emulation = running[-1]
        grid = (grid_x, grid_y, grid_z)
        _check_grid(self._arguments.name, grid)
        slots: list[Any] = [0] * (5 * _RESERVED)
        ranges = [0] * (2 * _RESERVED)
        bases = []
        kept = (value for value, keep in zip(values, self._arguments.kept, strict=True) if keep)
        for (name, kind), value in zip(self._arguments.types.items(), kept, strict=True):
            if kind.startswith("*"):
                address, low, high = _storage(name, value)
                slots += (address, address, 0, high - low, 1)
                ranges += (low, high)
                bases.append(address)
            else:
                slots.append(value)
        counters = (ctypes.c_int64 * (_COUNTERS * self._count))()
        fault = (ctypes.c_int64 * 8)()
        if enter is not None:
            enter(launch_metadata)
        failed = self._run(
            ctypes.c_void_p(function),
            self._slots.pack(*slots, *grid),
            self._ranges.pack(*ranges),
            ctypes.c_int64(self._count),
            (ctypes.c_int32 * 3)(*grid),
            ctypes.c_int64(emulation.threads),
            ctypes.c_int64(emulation.shuffle is not None),
            ctypes.c_uint64((emulation.shuffle or 0) & (2**64 - 1)),
            counters,
            fault,
        )
        if leave is not None:
            leave(launch_metadata)
        if failed:
            raise self._error(failed, list(fault), bases)
        first = _COUNTERS * _RESERVED
        traffic = {
            name: Traffic(*counters[first + _COUNTERS * i : first + _COUNTERS * (i + 1)])
            for i, name in enumerate(self._arguments.pointers)
        }
        emulation.launches.append(Launch(self._arguments.name, grid, self._arguments.constants, traffic))

    def _error(self, code: int, fault: list[int], bases: list[int]) -> OfflineError:
        reason, argument, access, address, size, *program = fault
        kernel = f"kernel {self._arguments.name}, program {tuple(program)}"
        if code == 2 or reason == 2:
            return OfflineError(f"{kernel}: the host has no memory for the kernel's tiles")
        what = f"{_ACCESSES[access]} of {size} bytes"
        if argument < _RESERVED:
            return OutOfBoundsError(f"{kernel}: {what} at address {address:#x}, which is in no argument's storage")
        name = self._arguments.pointers[argument - _RESERVED]
        offset = address - bases[argument - _RESERVED]
        return OutOfBoundsError(f"{kernel}: {what} at byte {offset} of argument {name}, outside its storage")


class Recorder:
    """Notes a launch; stands where `Launcher` does."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self._source = source
        self._options = metadata

    def __call__(self, grid_x: int, grid_y: int, grid_z: int, stream: Any, function: Any, packed: Any, *values: Any) -> None:
        source = self._source
        grid = (grid_x, grid_y, grid_z)
        _check_grid(source.fn.__name__, grid)
        divisible = [source.fn.arg_names[i] for i in source.attrs.arg_properties.get("tt.divisibility", ())]
        recordings[-1].append(
            LaunchRecord(
                kernel=source.fn,
                name=source.fn.__name__,
                signature=dict(source.signature),
                constants=dict(source.constants),
                grid=grid,
                options=_changed_options(self._options),
                divisible=tuple(divisible),
            )
        )


def _changed_options(metadata: Any) -> dict[str, Any]:
    """The options of a launch that are not the defaults."""
    from .frontend import options_from

    given = {name: getattr(metadata, name, default) for name, default in options_from({}).__dict__.items()}
    defaults = options_from({}).__dict__
    # The JIT keeps metadata as JSON, where tuples become lists.
    return {name: value for name, value in given.items() if value != defaults[name] and not isinstance(value, list)}


def _check_grid(kernel: str, grid: tuple[int, int, int]) -> None:
    programs = grid[0] * grid[1] * grid[2]
    if programs > MAX_PROGRAMS:
        raise OfflineError(f"the grid of kernel {kernel} has {programs} programs, must be at most {MAX_PROGRAMS}")


def _storage(name: str, value: Any) -> tuple[int, int, int]:
    """A tensor's address, and the bounds of the storage it lies in."""
    tensor: torch.Tensor = getattr(value, "base", value)
    if tensor.device.type != "cpu":
        raise OfflineError(f"argument {name} is on {tensor.device}, must be a CPU tensor under emulation")
    storage = tensor.untyped_storage()
    low = storage.data_ptr()
    return tensor.data_ptr(), low, low + storage.nbytes()
