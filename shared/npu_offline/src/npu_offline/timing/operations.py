"""Translates operations of the final module to Python expressions for the items that the scalar unit issues."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from math import prod
from typing import Any

from xdsl.dialects.builtin import DenseArrayBase
from xdsl.ir import Operation, SSAValue

from ..errors import UnsupportedError
from ..module import shapes
from ..module.jumps import is_cell
from ..module.mlir import name_of, property_of, symbol_of
from ..module.operations import NOTHING, PIPES, Pipe, operation_of
from ..module.shapes import Dimension, itemsize_of, shape_of, space_of
from . import cube_costs
from .costs import BLOCK_BYTES, VECTOR_COSTS, ChipCosts
from .cube import product_of
from .dataflow import address_depends_on_memory, place_of
from .instructions import (
    Barrier,
    CubeStep,
    Item,
    ScalarAccess,
    SetCrossFlag,
    SetFlag,
    Transfer,
    VectorFunction,
    WaitCrossFlag,
    WaitFlag,
)
from .register_costs import library
from .vector_costs import vector

_CUBE_TRANSFERS = (["gm", "l1"], ["l0c", "gm"])
_FILLS = ("vbrc", "set_l1_2d")


class Emitter:
    """Writes expressions for items; `constants` has the objects that they name."""

    def __init__(self, costs: ChipCosts, arguments: dict[SSAValue, str], name: Callable[[SSAValue], str]) -> None:
        self._costs = costs
        self._arguments = dict(arguments)
        self._name = name
        self.constants: dict[str, Any] = {}
        self.functions: Mapping[str, VectorFunction] = {}

    def is_view(self, op: Operation) -> bool:
        """Whether an operation costs the scalar unit nothing of its own."""
        return shapes.is_view(op)

    def item(self, op: Operation) -> str | None:
        """An expression for what an operation makes the scalar unit issue; None where it is scalar arithmetic."""
        name = name_of(op)
        if name in ("memref.load", "memref.store"):
            if is_cell(op.operands[0 if name == "memref.load" else 1]):
                return None
            return self._constant(self._scalar_access(op, name))
        if name == "func.call":
            return self._instruction(op, symbol_of(op, "callee"))
        if not name.startswith("hivm.hir."):
            return None
        if name in NOTHING:
            return None
        short = name.removeprefix("hivm.hir.")
        if short in ("set_flag", "wait_flag"):
            return self._flag(op, SetFlag if short == "set_flag" else WaitFlag)
        if short in ("sync_block_set", "sync_block_wait"):
            return self._cross_flag(op, short)
        if short == "pipe_barrier":
            return self._constant(Barrier(_pipe(op, "pipe")))
        return self._instruction(op, short)

    def product(self, op: Operation) -> str | None:
        """An expression for all items that a matrix product makes the scalar unit issue; None for anything else."""
        product = product_of(op)
        if product is None:
            return None
        return f"{self._constant(product.expand)}({', '.join(self._text(number) for number in product.arguments)})"

    def place(self, op: Operation) -> str:
        """An expression whose value is equal for transfers of the same memory; "None" for other operations."""
        memory = next((operand for operand in op.operands if space_of(operand.type) == "gm"), None)
        if memory is None or name_of(op).startswith("memref."):
            return "None"
        start = shapes.start_of(memory)
        if start is not None:
            terms, strides = start
            offset = " + ".join(" * ".join(self._number(factor) for factor in term) for term in terms)
            return f"({', '.join([offset, *(self._number(stride) for stride in strides)])},)"
        parts = place_of(memory)
        numbers = [self._name(value) for part in parts for value in part if isinstance(value, SSAValue)]
        constants = tuple(text for part in parts for text in part if isinstance(text, str))
        return f"({', '.join([*numbers, self._constant(constants)])},)"

    def _number(self, value: int | SSAValue) -> str:
        return str(value) if isinstance(value, int) else self._name(value)

    def loaded(self, op: Operation) -> str:
        """The value that a scalar load yields: an element of an argument, or unknown."""
        memory, *indices = op.operands
        argument = self._argument(memory)
        source = memory.owner
        if argument is None or len(indices) != 1:
            return "UNKNOWN"
        index = self._name(indices[0])
        while isinstance(source, Operation):
            if name_of(source) == "memref.reinterpret_cast":
                static = property_of(source, "static_offsets")
                assert isinstance(static, DenseArrayBase)
                offset = self._name(source.operands[1]) if int(static.get_values()[0]) < 0 else str(static.get_values()[0])
                index = f"{index} + {offset}"
            elif name_of(source) not in ("memref.cast", "memref.extract_strided_metadata"):
                return "UNKNOWN"
            source = source.operands[0].owner
        return f"element({argument}, {index})"

    def _constant(self, value: object) -> str:
        name = f"k{len(self.constants)}"
        self.constants[name] = value
        return name

    def _sized(self, make: Callable[..., Item], dimensions: tuple[Dimension, ...]) -> str:
        """An item whose shape may be known at run time only."""
        if all(isinstance(factor, int) for factors in dimensions for factor in factors):
            return self._constant(make(*(prod(factors) for factors in dimensions)))  # type: ignore[arg-type]
        return f"{self._constant(cache(make))}({', '.join(self._text(factors) for factors in dimensions)})"

    def _text(self, factors: Dimension) -> str:
        return " * ".join(str(factor) if isinstance(factor, int) else self._name(factor) for factor in factors)

    def _cross_flag(self, op: Operation, name: str) -> str:
        waiting, source = _pipe(op, "pipe"), _pipe(op, "tpipe")
        if waiting != "S" or source is None:
            raise UnsupportedError(f"the time model does not know the pipes of {op}")
        flag = property_of(op, "static_flag_id")

        @cache
        def make(number: int) -> Item:
            return SetCrossFlag(source, number) if name == "sync_block_set" else WaitCrossFlag(number)

        number = self._name(op.operands[0]) if flag is None else str(flag).partition(" ")[0]
        return f"{self._constant(make)}({number})"

    def _flag(self, op: Operation, kind: type[SetFlag] | type[WaitFlag]) -> str:
        source, target = _pipe(op, "set_pipe"), _pipe(op, "wait_pipe")
        if source is None or target is None:
            raise UnsupportedError(f"the time model does not know the pipes of {op}")
        event = property_of(op, "static_event_id")
        if event is not None:
            return self._constant(kind(source, target, int(str(event).partition("EVENT_ID")[2].strip("<> "))))

        @cache
        def make(number: int) -> Item:
            return kind(source, target, number)

        return f"{self._constant(make)}({self._name(op.operands[0])})"

    def _scalar_access(self, op: Operation, name: str) -> ScalarAccess:
        memory = op.operands[0 if name == "memref.load" else 1]
        argument = self._argument(memory)
        cycles = self._costs.scalar_local if argument is None else self._costs.scalar_global
        plain = None if argument is None else argument.strip("'")
        return ScalarAccess(name.removeprefix("memref."), plain, cycles, int(itemsize_of(memory.type)))

    def _argument(self, memory: SSAValue) -> str | None:
        """The Python literal of the argument's name whose memory it is; None on chip."""
        if space_of(memory.type) != "gm":
            return None
        return self._arguments.get(shapes.root_of(memory), "'?'")

    def _instruction(self, op: Operation, name: str) -> str:
        if name in self.functions:
            function = self.functions[name]
            return f"{self._constant(function.call)}({', '.join(self._name(op.operands[i]) for i in function.needed)})"
        memories = [operand for operand in op.operands if space_of(operand.type) is not None]
        spaces = [space_of(memory.type) for memory in memories]
        if "gm" in spaces and (set(spaces) <= {"gm", "ub"} or spaces in _CUBE_TRANSFERS):
            return self._transfer(name, memories, spaces.index("gm"))
        if spaces == ["l1"] and name.startswith(_FILLS):
            return self._fill(name, memories[0])
        if not memories or any(space != "ub" for space in spaces):
            where = " and ".join(sorted({str(space) for space in spaces})) or "no memory"
            raise UnsupportedError(f"the time model has no cost for {name} on {where}")
        known = operation_of(op)
        reduced = known.axes if known is not None and known.action in ("reduce", "arg") else None
        # The workspace of a sort, and of a reduction of a small tile, is larger than what it is for.
        largest = memories[0] if reduced is not None or "sort" in name else max(memories, key=_size)
        itemsize = max(itemsize_of(memory.type) for memory in memories)
        shape = shape_of(largest)
        if self._costs.registers:
            return self._sized(lambda *sizes: library(name, sizes, itemsize), shape)
        if f"{name}s" in VECTOR_COSTS and any(space_of(operand.type) is None for operand in op.operands):
            name = f"{name}s"  # with a number, not a second tensor

        def make(*sizes: int) -> Item:
            return vector(name, sizes, itemsize, reduced, self._costs.vector_head)

        return self._sized(make, shape)

    def _fill(self, name: str, memory: SSAValue) -> str:
        itemsize = int(itemsize_of(memory.type))

        def make(*sizes: int) -> Item:
            nbytes = prod(sizes) * itemsize
            return CubeStep(name, "MTE2", nbytes, cube_costs.fill_l1(nbytes), 0)

        return self._sized(make, shape_of(memory))

    def _transfer(self, name: str, memories: list[SSAValue], position: int) -> str:
        memory = memories[position]
        argument = self._argument(memory) or ""
        itemsize = int(itemsize_of(memory.type)) or 1
        contiguous = shapes.is_contiguous_inside(memory)
        gathered = address_depends_on_memory(memory)
        pipe: Pipe = "MTE2" if position == 0 else "FIX" if space_of(memories[0].type) == "l0c" else "MTE3"

        def make(*sizes: int) -> Item:
            rows, length = (prod(sizes[:-1]), sizes[-1] * itemsize) if contiguous else (prod(sizes), itemsize)
            moved = rows * -(-length // BLOCK_BYTES) * BLOCK_BYTES
            cycles = cube_costs.drain(prod(sizes[:-1]), sizes[-1]) if pipe == "FIX" else 0
            return Transfer(name, pipe, argument.strip("'"), moved, prod(sizes) * itemsize, gathered, cycles)

        return self._sized(make, shape_of(memory))


def _size(memory: SSAValue) -> float:
    """A sort key: the elements of an operand; a size known only at run time counts as the largest."""
    factors = [factor for dimension in shape_of(memory) for factor in dimension]
    known = [factor for factor in factors if isinstance(factor, int)]
    return prod(known) if len(known) == len(factors) else float("inf")


def _pipe(op: Operation, name: str) -> Pipe | None:
    """A pipe by its attribute; None for all."""
    text = str(property_of(op, name)).partition("PIPE_")[2].strip("<> ")
    if text == "ALL":
        return None
    for pipe in PIPES:
        if pipe == text:
            return pipe
    raise UnsupportedError(f"the time model does not know the pipe {text}")
