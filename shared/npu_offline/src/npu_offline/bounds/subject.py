"""What is judged: a kernel, and expressions of its sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..launches import LaunchRecord


@dataclass(frozen=True)
class Subject:
    """A kernel, and the sizes that it is judged for. Expressions are in Python, of sizes, constants and integer arguments.

    Attributes:
        record: the kernel, the types of its arguments, and its constants; its grid is not looked at.
        ranges: by size, its first number and the one behind its last.
        numbers: by argument that is an integer, an expression.
        extents: by argument that is a tensor, an expression of how many elements it has.
        grid: expressions of the programs in x, y and z.
        contents: by tensor of integers, expressions of the least of them and of the number behind the largest.
        conditions: comparisons that hold for the sizes.
    """

    record: LaunchRecord
    ranges: Mapping[str, tuple[int, int]]
    numbers: Mapping[str, str]
    extents: Mapping[str, str]
    grid: Sequence[str]
    contents: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    conditions: Sequence[str] = ()
