"""The active emulations, and the settings that launches of one have."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import struct
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from ..launches import Emulation

ACCESS_FIELDS = 8  # as in launch.h
_WATCH_USE, _WATCH_RACES, WATCH_LOCKS = 1, 2, 4  # as in runtime.h
PROGRAM_SECONDS = 60
"""The processor time that one program of a grid may take: a limit for loops that do not end, not for slow programs."""
PROGRESS_SECONDS = 10.0
"""How often a command says that a launch still runs."""


class Clock:
    """How long launches run: says so while they do, and stops those that take longer than a limit."""

    def __init__(self, limit: float | None = None) -> None:
        """
        Args:
            limit: seconds that a launch may take; None for no limit.
        """
        self.limit = limit
        self._running: dict[int, tuple[str, float, ctypes.c_int32]] = {}
        self._numbers = itertools.count()
        self._ended = threading.Event()

    @contextlib.contextmanager
    def launch(self, what: str) -> Iterator[ctypes.c_int32]:
        """Around a launch; yields what is 1 once it has taken too long."""
        number, late = next(self._numbers), ctypes.c_int32(0)
        self._running[number] = (what, time.monotonic(), late)
        try:
            yield late
        finally:
            del self._running[number]

    def watch(self) -> None:
        """Look at launches until `end`."""
        told: dict[int, float] = {}
        while not self._ended.wait(_LOOK_SECONDS):
            now = time.monotonic()
            for number, (what, started, late) in list(self._running.items()):
                if self.limit is not None and now - started > self.limit:
                    late.value = 1
                if now - told.get(number, started) >= PROGRESS_SECONDS:
                    told[number] = now
                    print(f"npu-offline: {what}: runs for {now - started:.0f} s", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Let `watch` return."""
        self._ended.set()


_LOOK_SECONDS = 0.1
clock = Clock()
"""Of the launches of this process: nobody looks at it outside of `timed`."""


@contextlib.contextmanager
def timed(limit: float | None) -> Iterator[None]:
    """Until the block ends, launches that run for long are named on standard error, and end after a limit in seconds."""
    global clock
    before, clock = clock, Clock(limit)
    watcher = threading.Thread(target=clock.watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        clock.end()
        watcher.join()
        clock = before


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
        meaning: str = "",
    ) -> None:
        super().__init__(soc, toolchain)
        self.meaning = meaning
        self.accesses = accesses
        self.checks, self.distinct, self.keep_going = checks, distinct, keep_going
        self.ledgers = ledgers
        self._settings = (threads, shuffle is not None, (shuffle or 0) & (2**64 - 1))
        self.watching = _WATCH_USE * ledgers + _WATCH_RACES * races

    def settings(
        self,
        watching: int,
        unit_bits: int,
        shared: int,
        *,
        mode: int,
        poison: int,
        chosen: Any,
        news: Any,
        issued: Any,
        accesses: Any,
        late: Any,
    ) -> bytes:
        """The struct `settings` of launch.h.

        With checks, programs run one after another, so that atomic updates have the same order in every run.

        Args:
            watching: bits of what is watched.
            unit_bits: log2 of the bytes of the narrowest argument's elements.
            shared: a bit for each argument that several programs may write.
            mode: `PLAIN`, `CHECKED` or `SURVEYED`.
            poison: the byte that unwritten memory of a core is filled with.
            chosen: numbers of the only programs to run; empty for all.
            news: a byte for each program, which a survey fills in.
            issued: a byte for each instruction, which checks fill in.
            accesses: a number, and fields of each access of the Unified Buffer by the first program, which checks fill in.
            late: becomes 1 when the launch has to stop.
        """
        threads, shuffle, seed = self._settings
        return _SETTINGS.pack(
            1 if self.checks else threads,
            shuffle,
            PROGRAM_SECONDS,
            seed,
            watching,
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
            ctypes.addressof(late),
        )


_SETTINGS = struct.Struct("<qqqQqqqqqQqQQQqQ")
running: list[RunningEmulation] = []
