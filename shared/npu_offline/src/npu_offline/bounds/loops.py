"""What `for` loops carry from turn to turn: values that grow by the same sum in each turn are known, others are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import z3
from xdsl.ir import Block, Operation, SSAValue

from ..module.mlir import name_of
from .question import Index, Question, Term, Value

_SUMS = {"arith.addi", "arith.subi", "tt.addptr", "tt.advance"}
_PURE = ("arith.", "tt.splat", "tt.broadcast", "tt.expand_dims", "tt.make_range", "tt.reshape", "tt.get_", "tt.trans")


class Step(NamedTuple):
    """What one operation adds to a carried value in each turn: a number, or one for each axis of a block pointer."""

    op: Operation
    added: Sequence[SSAValue]

    @property
    def sign(self) -> int:
        """-1 for a subtraction."""
        return -1 if name_of(self.op) == "arith.subi" else 1


def steps_of(carried: SSAValue, yielded: SSAValue, loop: Operation) -> list[Step] | None:
    """The steps that lead from a carried value to its value in the next turn.

    Args:
        carried: the value in a turn.
        yielded: the value that the turn ends with.
        loop: the loop.

    Returns:
        None where the value does not grow by sums of what no turn changes.
    """
    found: list[Step] = []
    while yielded is not carried:
        op = yielded.owner
        if not isinstance(op, Operation) or name_of(op) not in _SUMS or _is_outside(op, loop):
            return None
        first, *rest = op.operands
        if name_of(op) == "arith.addi" and is_invariant(first, loop):
            first, rest = rest[0], [first]
        if not all(is_invariant(each, loop) for each in rest):
            return None
        found.append(Step(op, rest))
        yielded = first
    return found


def is_invariant(value: SSAValue, loop: Operation) -> bool:
    """Whether a value is the same in each turn of a loop."""
    owner = value.owner
    if isinstance(owner, Block):
        parent = owner.parent_op()
        return parent is not None and parent is not loop and _is_outside(parent, loop)
    if _is_outside(owner, loop):
        return True
    pure = name_of(owner).startswith(_PURE) and not owner.regions
    return pure and all(is_invariant(each, loop) for each in owner.operands)


def _is_outside(op: Operation, loop: Operation) -> bool:
    parent: Operation | None = op
    while parent is not None and parent is not loop:
        parent = parent.parent_op()
    return parent is None


class Turns(NamedTuple):
    """Of a loop: the number of the turn, from 0, how many turns it takes, and the induction variable.

    A question that asks for the induction variable learns that the turn takes place.
    """

    turn: Value
    total: Value
    induction: Value


def turns_of(loop: Operation, bits: int, first: Value, stop: Value, step: Value) -> Turns:
    """The turns of an `scf.for` whose induction variable has so many bits: if it overflows, the loop goes on."""

    def turn(question: Question, _: Index) -> Term:
        found = z3.FreshInt("turn")
        question.facts += [found >= 0, question.at(step) > 0]
        return found

    def at(question: Question, number: Term) -> Term:
        return question.at(first) + number * question.at(step)

    def induction(question: Question, _: Index) -> Term:
        number = question.at(turns.turn)
        exact = at(question, number)
        reached = z3.Or(number == 0, exact - question.at(step) < question.at(stop))
        if question.wraps(loop):  # or there is a turn before this one whose next number is too large
            last = z3.FreshInt("turn")
            too_large = at(question, last) + question.at(step) >= 2 ** (bits - 1)
            overflowed = z3.And(last >= 0, last < number, at(question, last) < question.at(stop), too_large)
            reached = z3.Or(reached, overflowed)
        question.facts.append(reached)
        found = question.integer(loop, exact, bits)
        question.facts.append(found < question.at(stop))
        return found

    def total(question: Question, _: Index) -> Term:
        if question.wraps(loop):
            return question.unknown("how often a loop turns whose counter may be too large", bits)
        found = z3.FreshInt("turns")
        end = at(question, found)
        last = z3.Or(found == 0, end - question.at(step) < question.at(stop))
        question.facts += [found >= 0, question.at(step) > 0, last]
        question.facts.append(question.integer(loop, end, bits) >= question.at(stop))
        return found

    turns = Turns(Value((), turn), Value((), total), Value((), induction))
    return turns


def grown(
    before: Value, number: Value, steps: Sequence[Step], axis: int, bits: int, value_of: Callable[[SSAValue], Value]
) -> Value:
    """A carried value after a number of turns.

    Args:
        before: the value before the loop.
        number: of turns.
        steps: of each turn.
        axis: which of the numbers that a step adds.
        bits: of an integer; 0 of a pointer's offset.
        value_of: the value of an operand.
    """

    def element(question: Question, index: Index) -> Term:
        sizes = (each.sign * _element(question, value_of(each.added[axis]), index) for each in steps)
        term = question.at(before, index) + question.at(number) * sum(sizes, z3.IntVal(0))
        return question.integer(steps[0].op, term, bits) if bits and steps else term

    return Value(before.shape, element)


def _element(question: Question, value: Value, index: Index) -> Term:
    return question.at(value, index if value.shape else ())
