"""Lines of C for a function of a final module, and the tables that the functions of a module share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from xdsl.dialects.builtin import IntegerAttr
from xdsl.ir import Operation as Op
from xdsl.ir import SSAValue

from ...module.mlir import property_of
from .instructions import Instruction
from .scalars import c_type


class Tables:
    """The buffers and instructions of all functions of a module, and the bytes used of each memory."""

    def __init__(self, bodies: Mapping[str, Op]) -> None:
        self.bodies = bodies
        self.buffers: list[str] = []
        self.instructions: list[Instruction] = []
        self.used: dict[str, int] = {}

    def add(self, *instructions: Instruction) -> int:
        """Add rows to the table of instructions; returns the number of the first."""
        self.instructions += instructions
        return len(self.instructions) - len(instructions)


class Writer:
    """Lines of C, and the names of the values in them."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.lines: list[str] = []
        self._names: dict[SSAValue, str] = {}

    def name(self, value: SSAValue) -> str:
        """The C variable of a value."""
        return self._names.setdefault(value, f"v{len(self._names)}")

    def declare(self, value: SSAValue) -> str:
        """Declare the C variable of a value; returns its name."""
        self.lines.append(f"{c_type(value.type)} {self.name(value)};")
        return self.name(value)

    def assign(self, targets: Sequence[SSAValue], values: Sequence[SSAValue]) -> None:
        """Assign all values at once: a target may be among them."""
        pairs = [
            (self.name(target), self.name(value), c_type(target.type)) for target, value in zip(targets, values, strict=True)
        ]
        if len(pairs) > 1:
            self.lines += [f"{kind} t_{target} = {value};" for target, value, kind in pairs]
            pairs = [(target, f"t_{target}", kind) for target, _, kind in pairs]
        self.lines += [f"{target} = {value};" for target, value, _ in pairs]

    def array(self, values: Sequence[int | SSAValue]) -> str:
        """A C array of numbers and values."""
        numbers = ", ".join(str(value) if isinstance(value, int) else self.name(value) for value in values)
        return f"(int64_t[]){{{numbers or '0'}}}"


def constant_of(value: SSAValue) -> int | None:
    """The integer that a value is, None where it is no constant."""
    number = property_of(value.owner, "value") if isinstance(value.owner, Op) else None
    return number.value.data if isinstance(number, IntegerAttr) else None
