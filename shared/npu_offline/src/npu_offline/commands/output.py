"""What commands print on: wide tables where nobody looks at a terminal, and progress only where somebody does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from rich.console import Console
from rich.progress import track

_T = TypeVar("_T")


def new_console() -> Console:
    """The terminal, or 180 columns for a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=180)


def progress(items: Iterable[_T], what: str, total: int, console: Console) -> Iterable[_T]:
    """The same items, with a bar that says what is done with them."""
    return track(items, what, total, console=console, transient=True, disable=not console.is_terminal)
