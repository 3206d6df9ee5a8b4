"""What a compiler says when it fails: the failed assertion, or each error once; no stack frames; and what to do."""

from __future__ import annotations

import re

_ASSERTION = re.compile(r"[\w.]+(?:/[\w.]+)*?/?([\w.]+:\d+): .*?(Assertion [`'].*' failed)")
_FRAME = re.compile(r"^\s*#\d+ 0x|^PLEASE submit|^Stack dump|^\d+\.\s+Program arguments|^\s*\^\s*$|^\s*$")
_LOCATIONS = re.compile(r"^(?:loc\([^)]*\): |<stdin>:\d+:\d+: )+")
CRASHED = "it crashed, and said nothing but its stack frames"
_SHOWN = 12  # lines
_ADVICE = {
    "Only reduce or reduce with index are supported": "tl.reduce takes one value, or a value and its index: reduce several"
    " values one by one, such as tl.sum(x) and tl.sum(x * x) for a mean and a variance",
}


def has_advice(said: str) -> bool:
    """Whether `reason` says what to do about it."""
    return any(sign in said for sign in _ADVICE)


def reason(said: str) -> str:
    """The lines of a compiler's output that say why it failed.

    Args:
        said: its output.
    """
    lines = dict.fromkeys(_LOCATIONS.sub("", line) for line in said.splitlines() if not _FRAME.search(line))
    assertions = [f"{found[1]}: {found[2]}" for found in map(_ASSERTION.search, lines) if found]
    errors = [line for line in lines if "error:" in line]
    specific = [line for line in errors if "Failed to run BiShengHIR pipeline" not in line]
    shown = assertions or specific or errors or list(lines)[-_SHOWN:]
    advice = [text for sign, text in _ADVICE.items() if sign in said]
    return "\n".join([*shown[:_SHOWN], *advice]) or CRASHED
