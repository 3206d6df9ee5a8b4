"""Translates a device function to a Python generator that yields, in order, what one program of a grid issues.

Scalar code is translated where trip counts, branches, event numbers, or sizes and addresses of transfers depend on it. All
other scalar arithmetic only costs time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Block, Operation, Region, SSAValue

from ..errors import EndlessLoopError, UnsupportedError
from ..module.jumps import ends_loop, is_cell
from ..module.mlir import name_of, symbol_of
from .control_flow import write_jumps
from .costs import ChipCosts
from .dataflow import needed_values
from .instructions import WORKSPACE, Item, VectorFunction
from .operations import Emitter
from .scalars import HELPERS, formula

Issue = tuple[float, Item, "tuple[Any, ...] | None"]
"""The scalar unit's cycles before it issues an item, the item, and where in its argument a transfer begins."""

_STRUCTURE = {"scf.yield", "scf.condition", "func.return", "annotation.mark", "hivm.hir.set_mask_norm"}
_FREE = {"arith.constant", "llvm.mlir.constant", "memref.alloca"}
_SLOW = {"arith.divf", "math.sqrt", "math.rsqrt", "llvm.fdiv", "llvm.intr.sqrt"}

MOST_TURNS = 20_000_000
"""Turns of its loops that one program of a grid may take: more than a minute of simulation."""


def check_turns(turns: int) -> None:
    """Raises EndlessLoopError: a program has taken too many turns."""
    if turns > MOST_TURNS:
        raise EndlessLoopError(f"a program was stopped after {MOST_TURNS:,} turns of its loops: a loop does not end")


@dataclass(frozen=True)
class Program:
    """A device function, translated.

    Attributes:
        name: of the kernel.
        core: what runs it: "AIC", a cube core, or "AIV", a vector core.
        source: of the generator, in Python.
        run: the generator: from the program's number, that of the vector core among those of its cube core, the grid in x,
            y and z, a function that reads an element of an argument (its name and the element's number), and the scalar
            arguments by name.
    """

    name: str
    core: str
    source: str
    run: Callable[..., Iterator[Issue]]


def translate(
    module: ModuleOp,
    arguments: Mapping[str, str],
    costs: ChipCosts,
    functions: Mapping[str, VectorFunction],
    *,
    rare: bool = False,
) -> tuple[Program, ...]:
    """Translate a final module: one program, or one for cube cores and one for the vector cores beside them.

    Args:
        module: parsed, in generic form.
        arguments: Triton type by name of the kernel's arguments, constants left out, in order.
        costs: of the chip.
        functions: the vector functions of the module, by name.
        rare: branches on values that the kernel computes are not taken, instead of an error.

    Raises:
        UnsupportedError: it has an operation that the model has no cost for.
    """
    programs = []
    for function in _device_functions(module):
        writer = Writer(costs, _names_of_arguments(function.regions[0].blocks[0], arguments), rare=rare)
        writer.emitter.functions = functions
        programs.append(_translate(function, arguments, writer))
    if sorted(program.core for program in programs) not in (["AIC"], ["AIV"], ["AIC", "AIV"]):
        raise UnsupportedError(f"the time model does not know a kernel in {len(programs)} parts")
    return tuple(programs)


def needs_cube_cores(module: ModuleOp) -> bool:
    """Whether a final module has a program for cube cores."""
    return any(_core_of(function) == "AIC" for function in _device_functions(module))


def _translate(function: Operation, arguments: Mapping[str, str], writer: Writer) -> Program:
    writer.needed = needed_values(function)
    writer.function(function.regions[0])
    scalars = [name for name, kind in arguments.items() if not kind.startswith("*")]
    header = f"def run(program, sub_block, grid_x, grid_y, grid_z, element, {', '.join(f'a_{name}' for name in scalars)}):"
    source = "\n".join([header, "    s = turns = 0", *writer.lines, "    return", "    yield"])
    space: dict[str, Any] = {**HELPERS, **writer.emitter.constants, "check_turns": check_turns}
    exec(compile(source, "<kernel>", "exec"), space)  # the text is made above, from operations that are checked one by one
    return Program(symbol_of(function, "sym_name"), _core_of(function), source, space["run"])


def _core_of(function: Operation) -> str:
    return "AIC" if "<AIC>" in str(function.attributes.get("hivm.func_core_type")) else "AIV"


def _device_functions(module: ModuleOp) -> list[Operation]:
    return [
        op
        for op in module.walk()
        if name_of(op) == "func.func" and op.regions[0].blocks and "DEVICE" in str(op.attributes.get("hacc.function_kind"))
    ]


def _names_of_arguments(block: Block, arguments: Mapping[str, str]) -> dict[SSAValue, str]:
    """Python names of the function's arguments: three of the compiler's come first, the grid comes last."""
    kinds = list(arguments.items())
    if len(block.args) != 3 + len(kinds) + 3:
        raise UnsupportedError(f"the kernel has {len(block.args)} arguments, must have {3 + len(kinds) + 3}")
    names: dict[SSAValue, str] = {**dict.fromkeys(block.args[:2], "UNKNOWN"), block.args[2]: repr(WORKSPACE)}
    for value, (name, kind) in zip(block.args[3:-3], kinds, strict=True):
        names[value] = repr(name) if kind.startswith("*") else f"a_{name}"
    return {**names, **dict(zip(block.args[-3:], ("grid_x", "grid_y", "grid_z"), strict=True))}


class Writer:
    """Writes the generator's statements."""

    def __init__(self, costs: ChipCosts, names: dict[SSAValue, str], *, rare: bool) -> None:
        self.names = names
        self.lines: list[str] = []
        self.needed: set[SSAValue] = set()
        self.costs = costs
        self.rare = rare
        self.emitter = Emitter(costs, names, self.name)

    def name(self, value: SSAValue) -> str:
        """The Python name of a value."""
        return self.names.setdefault(value, f"v{len(self.names)}")

    def function(self, region: Region) -> None:
        """All of a function."""
        if len(region.blocks) == 1:
            self.body(region.blocks[0], 1)
        else:
            write_jumps(region, self.lines.append, self.condition, self.body, self._assign)

    def condition(self, branch: Operation) -> str:
        """An expression for a branch's condition. Rare branches are not taken; the end of a loop is never rare."""
        condition = self.name(branch.operands[0])
        return f"unless_rare({condition})" if self.rare and not ends_loop(branch) else condition

    def body(self, block: Block, depth: int) -> None:
        """All operations of a block."""
        indent = "    " * depth
        pending: float = 0

        def flush() -> None:
            nonlocal pending
            if pending:
                self.lines.append(f"{indent}s += {pending:g}")
                pending = 0

        for op in block.ops:
            name = name_of(op)
            if name in ("scf.for", "scf.if", "scf.while"):
                flush()
                getattr(self, name.replace("scf.", "_"))(op, depth)
            elif items := self.emitter.product(op):
                flush()
                self.lines += [f"{indent}for item in {items}:", f"{indent}    yield s, item, None"]
                self.lines += [f"{indent}    s = {self.costs.scalar_op:g}", f"{indent}s = 0"]
            elif item := self.emitter.item(op):
                flush()
                self.lines += [f"{indent}yield s, {item}, {self.emitter.place(op)}", f"{indent}s = 0"]
            elif name not in _STRUCTURE and not self.emitter.is_view(op):
                cost = self.costs.scalar_float if name in _SLOW else self.costs.scalar_op
                pending += 0 if name in _FREE else cost
            if name == "memref.store" and is_cell(op.operands[1]):
                self._assign([op.operands[1]], [op.operands[0]], depth)
            if name in _STRUCTURE or not op.results:
                continue
            for result in op.results:
                if result in self.needed and result not in self.names:
                    self.lines.append(f"{indent}{self.name(result)} = {self._value(op)}")
        flush()
        self.lines.append(f"{indent}pass")

    def _value(self, op: Operation) -> str:
        if name_of(op) == "hivm.hir.get_block_idx":
            return "program"
        if name_of(op) == "hivm.hir.get_sub_block_idx":
            return "sub_block"
        if name_of(op) == "memref.load":
            return self.name(op.operands[0]) if is_cell(op.operands[0]) else self.emitter.loaded(op)
        return formula(op, [self.name(operand) for operand in op.operands])

    def _assign(self, targets: Sequence[SSAValue], values: Sequence[SSAValue], depth: int) -> None:
        pairs = [(self.name(t), self.name(v)) for t, v in zip(targets, values, strict=True) if t in self.needed]
        if pairs:
            left, right = (", ".join(names) for names in zip(*pairs, strict=True))
            self.lines.append(f"{'    ' * depth}{left} = {right}")

    def _for(self, op: Operation, depth: int) -> None:
        first, last, step, *initial = op.operands
        block = op.regions[0].blocks[0]
        variable, *carried = block.args
        self._assign(carried, initial, depth)
        bounds = ", ".join(self.name(value) for value in (first, last, step))
        self.lines.append(f"{'    ' * depth}for {self.name(variable)} in range({bounds}):")
        self._turn(depth + 1)
        self.lines.append(f"{'    ' * (depth + 1)}s += {2 * self.costs.scalar_op:g}")  # the counter, the jump
        self.body(block, depth + 1)
        self._assign(carried, _yielded(block), depth + 1)
        self._assign(list(op.results), carried, depth)

    def _turn(self, depth: int) -> None:
        self.lines += [f"{'    ' * depth}turns += 1", f"{'    ' * depth}check_turns(turns)"]

    def _if(self, op: Operation, depth: int) -> None:
        then, *otherwise = [region.blocks[0] for region in op.regions if region.blocks]
        self.lines.append(f"{'    ' * depth}s += {self.costs.scalar_op:g}")
        self.lines.append(f"{'    ' * depth}if {self.condition(op)}:")
        self.body(then, depth + 1)
        self._assign(list(op.results), _yielded(then), depth + 1)
        for block in otherwise:
            self.lines.append(f"{'    ' * depth}else:")
            self.body(block, depth + 1)
            self._assign(list(op.results), _yielded(block), depth + 1)

    def _while(self, op: Operation, depth: int) -> None:
        before, after = (region.blocks[0] for region in op.regions)
        self._assign(list(before.args), list(op.operands), depth)
        self.lines.append(f"{'    ' * depth}while True:")
        self._turn(depth + 1)
        self.body(before, depth + 1)
        assert before.last_op is not None
        condition, *passed = before.last_op.operands
        indent = "    " * (depth + 1)
        self.lines += [f"{indent}s += {self.costs.scalar_op:g}", f"{indent}if not {self.name(condition)}:"]
        self._assign(list(op.results), passed, depth + 2)
        self.lines.append(f"{indent}    break")
        self._assign(list(after.args), passed, depth + 1)
        self.body(after, depth + 1)
        self._assign(list(before.args), _yielded(after), depth + 1)


def _yielded(block: Block) -> list[SSAValue]:
    last = block.last_op
    return list(last.operands) if last is not None and name_of(last) == "scf.yield" else []
