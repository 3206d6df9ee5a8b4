"""Rules that a kernel's source suppresses, each with the reason, in a comment: `# lint: allow RULE: REASON`."""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

from ..errors import OfflineError
from .catalogue import RULES

_SUPPRESSION = re.compile(r"#\s*lint:\s*allow\b(?P<rest>.*)$", re.MULTILINE)
_PARTS = re.compile(r"^\s+(?P<rule>[\w-]+):\s*(?P<reason>\S.*)$")


@functools.cache
def suppressions_of(kernel: Any) -> dict[str, str]:
    """The reason by rule, from the source of a `@triton.jit` function.

    Raises:
        OfflineError: a suppression names no rule, or gives no reason.
    """
    found = {}
    for comment in _SUPPRESSION.finditer(inspect.getsource(kernel.fn)):
        parts = _PARTS.match(comment["rest"])
        where = f"the suppression in kernel {kernel.__name__} is {comment[0].strip()!r}, must be"
        if parts is None:
            raise OfflineError(f"{where} `# lint: allow RULE: REASON`")
        if parts["rule"] not in RULES:
            raise OfflineError(f"{where} of a rule: {', '.join(RULES)}")
        found[parts["rule"]] = parts["reason"].strip()
    return found
