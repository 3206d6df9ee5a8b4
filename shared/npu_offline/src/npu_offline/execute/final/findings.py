"""Findings of the machine: from the lines that findings.c writes to `Finding`s."""

from __future__ import annotations

from collections.abc import Callable

from ...errors import Finding, FindingsError, UnsupportedError

FINDING_BYTES = 1 << 16  # as in runtime.h
WEAK = "weak hazard"
_UNKNOWN = "unknown"  # what the machine does not know: no finding


def read_findings(noted: bytes, named: Callable[[str], str] = str) -> list[Finding]:
    """Findings from lines of the program's three numbers, the kind and the text, in which `named` names arguments.

    Raises:
        UnsupportedError: the machine does not know what the module asks for.
    """
    found = []
    for line in noted.decode(errors="replace").splitlines():
        program, kind, text = line.split("|", 2)
        if kind == _UNKNOWN:
            raise UnsupportedError(f"execution does not know this: {text}")
        x, y, z = (int(number) for number in program.split())
        found.append(Finding(kind, (x, y, z), named(text)))
    return found


def raise_findings(kernel: str, noted: bytes, named: Callable[[str], str] = str) -> None:
    """Raise FindingsError if there are any."""
    findings = [finding for finding in read_findings(noted, named) if finding.kind != WEAK]
    if findings:
        raise FindingsError(kernel, findings)
