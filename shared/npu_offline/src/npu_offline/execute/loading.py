"""Loads kernels, which are shared objects of this host."""

from __future__ import annotations

import contextlib
import ctypes
import tempfile
from dataclasses import dataclass

from ..toolchain.cache import private_folder
from .native import runtime

# Symbols of a final module's shared object: bytes of workspace for each program, locks, names of instructions and buffers.
WORKSPACE, LOCKS = "npu_offline_workspace", "npu_offline_locks"
INSTRUCTIONS, BUFFERS = "npu_offline_instructions", "npu_offline_buffers"


@dataclass(frozen=True)
class Binary:
    """A kernel's shared object and, where results are to be compared, that of its Linalg IR."""

    main: bytes
    beside: bytes = b""

    def packed(self) -> bytes:
        """One string of bytes, as Triton keeps it."""
        return len(self.main).to_bytes(8, "little") + self.main + self.beside

    @classmethod
    def unpacked(cls, data: bytes) -> Binary:
        """The binary that `packed` made these bytes of."""
        end = 8 + int.from_bytes(data[:8], "little")
        return cls(data[8:end], data[end:])


@dataclass(frozen=True)
class Loaded:
    """A kernel in memory.

    Attributes:
        address: of its entry.
        beside: of the entry of the Linalg IR; 0 if there is none.
        workspace: bytes of global memory for each program.
        locks: that its programs take turns by.
        instructions, buffers: names of the final module's, in order; none for Linalg IR.
        libraries: keep the shared objects loaded.
    """

    address: int
    beside: int
    workspace: int
    locks: int
    instructions: tuple[str, ...]
    buffers: tuple[str, ...]
    libraries: tuple[ctypes.CDLL, ...]


loaded: dict[int, Loaded] = {}
"""By the address of the entry, which Triton passes to a launch."""


def load(binary: Binary, entry: str) -> Loaded:
    """Load the shared objects of a binary."""
    runtime()
    libraries: tuple[ctypes.CDLL, ...] = (_load(binary.main),)
    if binary.beside:
        with contextlib.suppress(OSError):  # the Linalg IR needs a function that this host lacks: nothing is compared
            libraries += (_load(binary.beside),)
    addresses = [ctypes.cast(getattr(library, entry), ctypes.c_void_p).value or 0 for library in libraries]
    main, beside = libraries[0], addresses[1] if len(addresses) > 1 else 0
    workspace, locks = (_number(main, symbol) for symbol in (WORKSPACE, LOCKS))
    instructions, buffers = tuple(_text(main, INSTRUCTIONS).split()), tuple(filter(None, _text(main, BUFFERS).split(";")))
    found = Loaded(addresses[0], beside, workspace, locks, instructions, buffers, libraries)
    loaded[found.address] = found
    return found


def _number(library: ctypes.CDLL, symbol: str) -> int:
    return ctypes.c_int64.in_dll(library, symbol).value if hasattr(library, symbol) else 0


def _text(library: ctypes.CDLL, symbol: str) -> str:
    if not hasattr(library, symbol):
        return ""
    return ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(library, symbol))).decode()


def _load(data: bytes) -> ctypes.CDLL:
    with tempfile.NamedTemporaryFile(dir=private_folder("loading"), suffix=".so") as file:  # which no other user can change
        file.write(data)
        file.flush()
        return ctypes.CDLL(file.name)
