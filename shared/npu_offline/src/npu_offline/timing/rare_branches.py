"""Branches that a kernel is expected not to take, as its source says: `# time: rare: REASON`.

The time model then takes the side that the source enters where the condition does not hold. This relies on the compilers not
inverting the condition.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from ..source_comments import comments_of

if TYPE_CHECKING:
    from triton.runtime.jit import JITFunction


@functools.cache
def has_rare_branches(kernel: JITFunction) -> bool:
    """Whether the time model may skip branches of a `@triton.jit` function on values that the function computes.

    Without the comment such a branch is an error: the model cannot tell whether it is taken.

    Raises:
        OfflineError: a comment of this kind has another form, or gives no reason.
    """
    return bool(comments_of(kernel, "time", r"rare:\s*\S.*", "# time: rare: REASON"))
