"""Walks through a kernel's TTIR once and collects its accesses, with the loops and branches that they are in."""

from __future__ import annotations

from collections.abc import Sequence

import z3
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.ir import Block as Body

from ..module.jumps import JUMPS, jumps_of
from ..module.mlir import name_of
from .loops import Step, Turns, grown, steps_of, turns_of
from .origins import ACCESSES, Origins
from .pointers import Access, Block, Nowhere, Pointer, chosen, through_block
from .question import Index, Question, Term, Value
from .results import Known, Results, checked_axes
from .types import bits_of, is_pointer

_ENDS = {"scf.yield", "scf.condition", "tt.return", *JUMPS}
_MASK = {"tt.load": 1, "tt.store": 2, "tt.atomic_rmw": 2}  # which operand it is
_OFFSET_BITS = 32  # of a block pointer's offsets


class Walk:
    """A walk through one function.

    Attributes:
        accesses: in the order of the text.
    """

    def __init__(self, results: Results, origins: Origins) -> None:
        """
        Args:
            results: what operations compute.
            origins: names and places.
        """
        self.accesses: list[Access] = []
        self._results, self._origins = results, origins
        self._known: dict[SSAValue, Known] = {}

    def through(self, function: Operation, arguments: Sequence[Known]) -> None:
        """Walk through a function whose arguments are known. An early return makes several blocks of it."""
        blocks = list(function.regions[0].blocks)
        self._known.update(zip(blocks[0].args, arguments, strict=True))
        paths: dict[Body, list[Sequence[Value]]] = {blocks[0]: [()]}
        for number, block in enumerate(blocks):
            path = _any_of(paths.get(block, []))
            self._block(block, path)
            for (target, values), taken in zip(jumps_of(block), self._conditions(block), strict=False):
                if target in blocks[: number + 1]:
                    self.accesses.append(Access("jump", "back", refused="a loop of branches is not known"))
                self._pass(block, target, values, is_first=target not in paths)
                paths.setdefault(target, []).append((*path, *taken))

    def _conditions(self, block: Body) -> list[Sequence[Value]]:
        """Of each jump of a block: when it is taken."""
        last = block.last_op
        if last is None or name_of(last) != "cf.cond_br":
            return [()]
        condition = self._number(last.operands[0])
        return [(condition,), (_not(condition),)]

    def _pass(self, block: Body, target: Body, values: Sequence[SSAValue], *, is_first: bool) -> None:
        """Make the arguments known that a jump passes; where several jumps do, nothing is known of them."""
        assert block.last_op is not None
        for argument, value in zip(target.args, values, strict=True):
            unknown = self._results.unknown(block.last_op, argument.type)
            self._known[argument] = self._known.get(value) if is_first else unknown

    def _block(self, block: Body, path: Sequence[Value]) -> None:
        """Walk through operations that are executed where the conditions of `path` hold."""
        for op in block.ops:
            match name_of(op):
                case "scf.for":
                    self._for(op, path)
                case "scf.while":
                    self._while(op, path)
                case "scf.if":
                    self._if(op, path)
                case _:
                    self._operation(op, path)

    def _operation(self, op: Operation, path: Sequence[Value]) -> None:
        name = name_of(op)
        if name in ACCESSES:
            access = self._access(op, path)
            self._origins.arguments[op] = access.argument
            self.accesses.append(access)
        elif name not in _ENDS and any(is_pointer(each.type) for each in op.operands):
            if not any(is_pointer(each.type) for each in op.results):
                self.accesses.append(Access(name, self._origins.place(op), refused=f"{name} is not known"))
        if op.results:
            self._know(op, self._results.of(op, [self._known.get(each) for each in op.operands]))

    def _access(self, op: Operation, path: Sequence[Value]) -> Access:
        kind, place, pointer = ACCESSES[name_of(op)], self._origins.place(op), self._known.get(op.operands[0])
        if isinstance(pointer, Block):
            offset, inside = through_block(pointer, checked_axes(op))
            return Access(kind, place, pointer.argument, path, inside, offset)
        if not isinstance(pointer, Pointer):
            reason = pointer.reason if isinstance(pointer, Nowhere) else "its pointer is not known"
            return Access(kind, place, refused=reason)
        position = _MASK.get(name_of(op), len(op.operands))
        mask = self._number(op.operands[position]) if len(op.operands) > position else None
        return Access(kind, place, pointer.argument, path, mask, pointer.offset)

    def _for(self, op: Operation, path: Sequence[Value]) -> None:
        first, stop, step = (self._known.get(each) for each in op.operands[:3])
        assert isinstance(first, Value)
        assert isinstance(stop, Value)
        assert isinstance(step, Value)
        turns, body = turns_of(op, bits_of(op.operands[0].type), first, stop, step), op.regions[0].blocks[0]
        self._known[body.args[0]] = turns.induction
        ends = [self._carried(op, number, turns) for number in range(len(op.results))]
        self._block(body, (*path, _entered(turns.induction)))
        self._know(op, ends)

    def _carried(self, op: Operation, number: int, turns: Turns) -> Known:
        """Make a value known that a loop carries, in each turn; returns the one after the loop."""
        body, start = op.regions[0].blocks[0], self._known.get(op.operands[3 + number])
        assert body.last_op is not None
        carried = body.args[1 + number]
        steps = steps_of(carried, body.last_op.operands[number], op)
        if steps is None or not isinstance(start, (Value, Pointer, Block)):
            self._known[carried] = self._results.unknown(op, carried.type)
            return self._results.unknown(op, carried.type)
        self._known[carried] = self._after(start, turns.turn, steps, carried.type)
        return self._after(start, turns.total, steps, carried.type)

    def _after(self, start: Value | Pointer | Block, turns: Value, steps: Sequence[Step], kind: Attribute) -> Known:
        def later(before: Value, axis: int, bits: int) -> Value:
            return grown(before, turns, steps, axis, bits, self._number)

        if isinstance(start, Pointer):
            return Pointer(start.argument, later(start.offset, 0, 0))
        if isinstance(start, Block):
            offsets = [later(each, axis, _OFFSET_BITS) for axis, each in enumerate(start.offsets)]
            return Block(start.argument, start.base, start.sizes, start.strides, offsets, start.shape)
        return later(start, 0, bits_of(kind))

    def _while(self, op: Operation, path: Sequence[Value]) -> None:
        """What such a loop carries is not known: how often it turns depends on that."""
        head, body = op.regions[0].blocks[0], op.regions[1].blocks[0]
        for value in (*head.args, *body.args, *op.results):
            self._known[value] = self._results.unknown(op, value.type)
        self._block(head, path)
        assert head.last_op is not None
        self._block(body, (*path, self._number(head.last_op.operands[0])))

    def _if(self, op: Operation, path: Sequence[Value]) -> None:
        condition = self._number(op.operands[0])
        ends: list[list[Known]] = []
        for region, taken in zip(op.regions, (condition, _not(condition)), strict=True):
            if region.blocks:
                block = region.blocks[0]
                self._block(block, (*path, taken))
                assert block.last_op is not None
                ends.append([self._known.get(each) for each in block.last_op.operands])
        for number, result in enumerate(op.results):
            yes, no = (end[number] for end in ends)
            known = isinstance(yes, (Value, Pointer)) and isinstance(no, (Value, Pointer))
            place = self._origins.place(op)
            self._known[result] = chosen(condition, yes, no, place) if known else self._results.unknown(op, result.type)

    def _know(self, op: Operation, found: Sequence[Known]) -> None:
        self._known.update(zip(op.results, found, strict=True))

    def _number(self, value: SSAValue) -> Value:
        found = self._known.get(value)
        assert isinstance(found, Value)
        return found


def _entered(induction: Value) -> Value:
    """A condition that always holds; a question that asks for it learns that the turn takes place."""
    return Value((), lambda question, _: question.at(induction) == question.at(induction))


def _any_of(paths: Sequence[Sequence[Value]]) -> Sequence[Value]:
    """Conditions that hold where all conditions of one of these paths do."""
    if len(paths) == 1:
        return paths[0]

    def one(question: Question, _: Index) -> Term:
        return z3.Or(*(z3.And(*map(question.at, path)) for path in paths))

    return (Value((), one),)


def _not(condition: Value) -> Value:
    return Value((), lambda question, _: z3.Not(question.at(condition)))
