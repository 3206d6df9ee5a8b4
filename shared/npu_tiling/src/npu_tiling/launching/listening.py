"""Who hears of this thread's launches, so that it can make them again: pytorch/tape.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .direct import DirectCall, Watchers


class Listener(Protocol):
    """Hears of launches."""

    def launched(
        self, call: DirectCall, grid: int, tensors: Sequence[Any], scalars: tuple[Any, ...], watchers: Watchers
    ) -> None:
        """A kernel was called without Triton's JIT.

        Args:
            call: calls it.
            grid: number of programs.
            tensors, scalars: the kernel's parameters, as `Launcher.__call__` takes them.
            watchers: true while launches have to go through the JIT.
        """

    def call(self, run: Callable[..., None], tensors: Sequence[Any]) -> None:
        """Call run(*tensors) now, and in every repeated call."""

    def refuse(self, reason: str) -> None:
        """What happens now cannot be done again for other tensors."""


class _OfThread(threading.local):
    listener: Listener | None = None


here = _OfThread()


def call(run: Callable[..., None], *tensors: Any) -> None:
    """Call run(*tensors), which writes to them: a collective. A repeated call calls it too, and does not look inside."""
    if here.listener is None:
        run(*tensors)
    else:
        here.listener.call(run, tensors)


def refuse(reason: str) -> None:
    """Say that what happens now cannot be done again for other tensors."""
    if here.listener is not None:
        here.listener.refuse(reason)
