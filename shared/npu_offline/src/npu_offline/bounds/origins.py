"""Names for values that are not known: which loads they are computed of, and in which lines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from xdsl.ir import Operation

from ..module.mlir import name_of

ACCESSES = {"tt.load": "load", "tt.store": "store", "tt.atomic_rmw": "atomic update", "tt.atomic_cas": "atomic update"}
_FAR = 50  # operations between a value and the load that it is computed of


class Origins:
    """Where the operations of a function stand, and what they load.

    Attributes:
        arguments: the tensor of each access that has been met.
    """

    def __init__(self, function: Operation, lines: Mapping[str, Sequence[str]]) -> None:
        """
        Args:
            function: the kernel.
            lines: as `lines_by_operation` returns them.
        """
        self._places: dict[Operation, str] = {}
        self.arguments: dict[Operation, str] = {}
        met: dict[str, int] = defaultdict(int)
        for op in function.walk():
            name = name_of(op)
            found = lines.get(name, ())
            self._places[op] = found[met[name]] if met[name] < len(found) else ""
            met[name] += 1

    def place(self, op: Operation) -> str:
        """Where an operation stands; of one with regions where the first operation in it does."""
        inside = (self._places.get(each, "") for each in op.walk())
        return next((place for place in inside if place), "an unknown line")

    def name(self, op: Operation) -> str:
        """What the result of an operation is: values of these tensors, or of this operation."""
        loads = dict.fromkeys(self._loads(op, 0))
        return " and ".join(loads) or f"the result of {name_of(op)} ({self.place(op)})"

    def _loads(self, op: Operation, distance: int) -> Iterator[str]:
        if name_of(op) in ACCESSES:
            yield f"values of {self.arguments.get(op) or 'memory'} ({self.place(op)})"
        elif name_of(op).startswith("scf."):
            yield f"what a loop or branch computes ({self.place(op)})"
        elif distance < _FAR:
            for operand in op.operands:
                if isinstance(operand.owner, Operation):
                    yield from self._loads(operand.owner, distance + 1)
