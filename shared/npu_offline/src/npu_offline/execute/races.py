"""Arguments that several programs may write alike, as a kernel's source says: `# races: allow ARGUMENT: REASON`."""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

from ..errors import OfflineError

_SUPPRESSION = re.compile(r"#\s*races:\s*allow\b(?P<rest>.*)$", re.MULTILINE)
_PARTS = re.compile(r"^\s+(?P<argument>\w+):\s*\S")


@functools.cache
def written_alike(kernel: Any) -> frozenset[str]:
    """Names of such arguments of a `@triton.jit` function. Reading what another program writes stays a race.

    Raises:
        OfflineError: a suppression names no argument, or gives no reason.
    """
    found = set()
    for comment in _SUPPRESSION.finditer(inspect.getsource(kernel.fn)):
        parts = _PARTS.match(comment["rest"])
        if parts is None or parts["argument"] not in kernel.arg_names:
            said = f"the suppression in kernel {kernel.__name__} is {comment[0].strip()!r}"
            raise OfflineError(f"{said}, must be `# races: allow ARGUMENT: REASON` with an argument of the kernel")
        found.add(parts["argument"])
    return frozenset(found)
