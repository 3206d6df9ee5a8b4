"""How far a run is, on standard error."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(total: int) -> Iterator[Callable[[str], None]]:
    """A function to call with what comes next, `total` times.

    It moves a bar where rich has a terminal, else prints lines.
    """
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
    except ImportError:
        yield _lines(total)
        return
    if not sys.stderr.isatty():
        yield _lines(total)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        done = -1

        def tell(step: str) -> None:
            nonlocal done
            done += 1
            bar.update(task, completed=done, description=step)

        yield tell


def _lines(total: int) -> Callable[[str], None]:
    start = time.monotonic()
    done = 0

    def tell(step: str) -> None:
        nonlocal done
        done += 1
        print(f"[{done}/{total}, {time.monotonic() - start:.0f} s] {step}", file=sys.stderr, flush=True)

    return tell
