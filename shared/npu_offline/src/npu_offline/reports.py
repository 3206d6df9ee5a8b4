"""The compiler's report on one kernel for one chip."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

SPACES = ("ub", "l1", "l0a", "l0b", "l0c")


@dataclass(frozen=True)
class Usage:
    """Bytes of one on-chip buffer: what the plan uses, as its highest byte, and what there is."""

    used: int
    available: int


@dataclass(frozen=True)
class Report:
    """A kernel as one Ascend compiler compiled it for one chip.

    Attributes:
        kernel, soc, toolchain: what was compiled, for what, by which version.
        fits: the compiler found an address for every buffer.
        ub, l1, l0a, l0b, l0c: on-chip memory, per core. `used` is 0 where the kernel does not fit, for there is no plan
            then. The compiler itself never assigns L0A and L0B: its matmul library does.
        required_ub_bytes: Unified Buffer that the compiler asked for, where that was more than there is.
        double_buffered: whether transfers overlap computation: every on-chip side of a DMA inside an innermost loop has
            two addresses. None if no DMA is inside a loop, where there is nothing to overlap with.
        message: what the compiler said: its overflow error, or notes of a version that retried with less.
        stages: IR by name: "ttir", "linalg", and "final" with addresses, pipe flags and library calls.
    """

    kernel: str
    soc: str
    toolchain: str
    fits: bool
    ub: Usage
    l1: Usage
    l0a: Usage
    l0b: Usage
    l0c: Usage
    required_ub_bytes: int | None = None
    double_buffered: bool | None = None
    message: str = ""
    stages: dict[str, str] = field(default_factory=dict, repr=False)

    def to_json(self) -> str:
        """The report as text."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Report:
        """The report that `to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        values.update((space, Usage(**values[space])) for space in SPACES)
        return Report(**values)
