"""Branches that a kernel hardly ever takes, as its source says: `# time: rare: REASON`.

The rare side is the one that the source enters if the condition holds. The compilers keep it so, in structured control flow
and in jumps; one that turned a condition round would not be noticed.
"""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

from ..errors import OfflineError

_NOTE = re.compile(r"#\s*time:(?P<rest>.*)$", re.MULTILINE)
_PARTS = re.compile(r"^\s*rare:\s*\S")


@functools.cache
def has_rare_branches(kernel: Any) -> bool:
    """Whether branches of a `@triton.jit` function on values that it computes itself are taken to be never taken.

    Without the note they are an error: what they cost could not be told.

    Raises:
        OfflineError: a note of this kind says something else, or gives no reason.
    """
    notes = list(_NOTE.finditer(inspect.getsource(kernel.fn)))
    for note in notes:
        if not _PARTS.match(note["rest"]):
            said = f"the note in kernel {kernel.__name__} is {note[0].strip()!r}"
            raise OfflineError(f"{said}, must be `# time: rare: REASON`")
    return bool(notes)
