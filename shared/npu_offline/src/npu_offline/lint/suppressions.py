"""Rules that a kernel's source suppresses, each with the reason, in a comment: `# lint: allow RULE: REASON`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from ..errors import OfflineError
from ..source_comments import comments_of
from .catalogue import RULES

if TYPE_CHECKING:
    from triton.runtime.jit import JITFunction


@functools.cache
def suppressions_of(kernel: JITFunction) -> dict[str, str]:
    """The reason by rule, from the source of a `@triton.jit` function.

    Raises:
        OfflineError: a suppression names no rule, or gives no reason.
    """
    found = {}
    for comment in comments_of(kernel, "lint", r"allow\s+([\w-]+):\s*(\S.*)", "# lint: allow RULE: REASON"):
        rule, reason = comment.groups()
        if rule not in RULES:
            raise OfflineError(
                f"a suppression in kernel {kernel.__name__} is of {rule!r}, must be of a rule: {', '.join(RULES)}"
            )
        found[rule] = reason
    return found
