"""What commands print on: wide tables where nobody looks at a terminal, and progress only where somebody does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import track

from ..errors import OfflineError
from ..module.places import located

_T = TypeVar("_T")


def new_console() -> Console:
    """The terminal, or 180 columns for a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=180)


def print_finding(console: Console, message: str, kernels: Mapping[str, str], beside: Path | str = "") -> None:
    """Print a message about one of some kernels as editors read it, `FILE:LINE:COLUMN: message`, not broken into lines.

    Args:
        console: where.
        message: of the first kernel that it names.
        kernels: TTIR by name; none where Triton refuses the kernel.
        beside: the kernel's file, where that is known.
    """
    named = [name for name in kernels if re.search(rf"\b{re.escape(name)}\b", message)] or list(kernels)
    print_line(console, located(message, kernels[named[0]] if named else "", beside))


def print_line(console: Console, text: str) -> None:
    """Print a text as it is."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def progress(items: Iterable[_T], what: str, total: int, console: Console) -> Iterable[_T]:
    """The same items, with a bar that says what is done with them."""
    return track(items, what, total, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def writing_to(option: str, path: Path) -> Iterator[None]:
    """Around what writes to the file or the folder that an option names.

    Raises:
        OfflineError: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise OfflineError(f"{option} is {str(path)!r}, which cannot be written: {error.strerror}") from None


def new_folder(option: str, path: Path) -> None:
    """Make the folder that an option names, if it is not there.

    Raises:
        OfflineError: it cannot be made.
    """
    with writing_to(option, path):
        path.mkdir(parents=True, exist_ok=True)


def write_json(option: str, path: Path, value: Any) -> None:
    """Write a value to the file that an option names.

    Raises:
        OfflineError: the file cannot be written.
    """
    with writing_to(option, path):
        path.write_text(json.dumps(value, indent=1))
