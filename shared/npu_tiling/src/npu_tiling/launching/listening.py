"""Who hears of this thread's launches, so that it can make the same again: pytorch/tape.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .direct import DirectCall


class Listener(Protocol):
    """Hears of launches."""

    def launched(
        self,
        call: DirectCall,
        index: int,
        grid: int,
        tensors: Sequence[Any],
        scalars: tuple[Any, ...],
        is_watched: Callable[[], bool],
    ) -> None:
        """A kernel was called without Triton's JIT.

        Args:
            call: calls it.
            index: the number of the device.
            grid: number of programs.
            tensors, scalars: the kernel's parameters, as `Launcher.__call__` takes them.
            is_watched: whether launches have to go through the JIT now.
        """

    def called(self, run: Callable[..., None], tensors: Sequence[Any]) -> None:
        """Calls run(*tensors), and does so again for other tensors."""

    def refuse(self, reason: str) -> None:
        """What happens now cannot be done again for other tensors."""


class _OfThread(threading.local):
    listener: Listener | None = None


here = _OfThread()


def call(run: Callable[..., None], *tensors: Any) -> None:
    """Call run(*tensors), which writes to them, and which a repeated call does as a whole: a collective."""
    if here.listener is None:
        run(*tensors)
    else:
        here.listener.called(run, tensors)


def refuse(reason: str) -> None:
    """Say that what happens now cannot be done again for other tensors."""
    if here.listener is not None:
        here.listener.refuse(reason)
