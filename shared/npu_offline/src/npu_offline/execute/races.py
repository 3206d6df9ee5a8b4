"""Arguments that several programs may write the same values to, by a comment: `# races: allow ARGUMENT: REASON`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from ..errors import OfflineError
from ..source_comments import comments_of

if TYPE_CHECKING:
    from triton.runtime.jit import JITFunction


@functools.cache
def shared_writes(kernel: JITFunction) -> frozenset[str]:
    """Names of such arguments of a `@triton.jit` function. Reading what another program writes stays a race.

    Raises:
        OfflineError: a suppression names no argument, or gives no reason.
    """
    found = set()
    for comment in comments_of(kernel, "races", r"allow\s+(\w+):\s*\S.*", "# races: allow ARGUMENT: REASON"):
        if comment[1] not in kernel.arg_names:
            raise OfflineError(
                f"a suppression in kernel {kernel.__name__} is of {comment[1]!r}, must be of an argument of the kernel"
            )
        found.add(comment[1])
    return frozenset(found)
