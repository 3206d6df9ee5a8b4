"""The active emulations, and the settings that launches of one have."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

from ..launches import Emulation

ACCESS_FIELDS = 8  # as in launch.h
_WATCH_USE, _WATCH_RACES = 1, 2  # as in launch.h
PROGRAM_SECONDS = 60
"""The processor time that one program of a grid may take: a limit for loops that do not end, not for slow programs."""


class RunningEmulation(Emulation):
    """An active emulation, and the settings of its launches."""

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
        distinct: bool = False,
        keep_going: bool = False,
        accesses: bool = False,
    ) -> None:
        super().__init__(soc, toolchain)
        self.accesses = accesses
        self.checks, self.distinct, self.keep_going = checks, distinct, keep_going
        self.ledgers = ledgers
        self._settings = (threads, shuffle is not None, (shuffle or 0) & (2**64 - 1))
        self.watching = _WATCH_USE * ledgers + _WATCH_RACES * races

    def settings(
        self, unit_bits: int, shared: int, *, mode: int, poison: int, chosen: Any, news: Any, issued: Any, accesses: Any
    ) -> bytes:
        """The struct `settings` of launch.h.

        With checks, programs run one after another, so that atomic updates have the same order in every run.

        Args:
            unit_bits: log2 of the bytes of the narrowest argument's elements.
            shared: a bit for each argument that several programs may write.
            mode: `PLAIN`, `CHECKED` or `SURVEYED`.
            poison: the byte that unwritten memory of a core is filled with.
            chosen: numbers of the only programs to run; empty for all.
            news: a byte for each program, which a survey fills in.
            issued: a byte for each instruction, which checks fill in.
            accesses: a number, and fields of each access of the Unified Buffer by the first program, which checks fill in.
        """
        threads, shuffle, seed = self._settings
        return _SETTINGS.pack(
            1 if self.checks else threads,
            shuffle,
            PROGRAM_SECONDS,
            seed,
            self.watching,
            unit_bits,
            shared,
            mode,
            poison,
            ctypes.addressof(chosen),
            len(chosen),
            ctypes.addressof(news),
            ctypes.addressof(issued) if self.checks else 0,
            ctypes.addressof(accesses) if self.accesses else 0,
            len(accesses) // ACCESS_FIELDS,
        )


_SETTINGS = struct.Struct("<qqqQqqqqqQqQQQq")
running: list[RunningEmulation] = []
