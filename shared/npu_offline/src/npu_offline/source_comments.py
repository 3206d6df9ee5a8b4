"""Comments in a kernel's source that this package reads: `# lint: ...`, `# races: ...`, `# time: ...`."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING

from .errors import OfflineError

if TYPE_CHECKING:
    from triton.runtime.jit import JITFunction


def comments_of(kernel: JITFunction, word: str, form: str, example: str) -> list[re.Match[str]]:
    """The comments that begin with a word and a colon, each matched as a whole.

    Args:
        kernel: the `@triton.jit` function.
        word: "lint", "races" or "time".
        form: a regular expression for all that follows the colon.
        example: how such a comment reads, for the error's message.

    Raises:
        OfflineError: such a comment has another form.
    """
    found = []
    for comment in re.finditer(rf"#\s*{word}:(?P<rest>.*)$", inspect.getsource(kernel.fn), re.MULTILINE):
        match = re.fullmatch(form, comment["rest"].strip())
        if match is None:
            raise OfflineError(f"the comment in kernel {kernel.__name__} is {comment[0].strip()!r}, must be `{example}`")
        found.append(match)
    return found
