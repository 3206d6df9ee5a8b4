"""Integer operations of the dialect `arith` as terms of a solver. Integers are signed; unsigned operations convert them."""

from __future__ import annotations

from collections.abc import Sequence

import z3
from xdsl.dialects.builtin import IntegerAttr
from xdsl.ir import Operation

from ..module.mlir import property_of
from .question import Question, Term

_FIRST_UNSIGNED = 6  # of arith.cmpi's predicates
_SAME = ("extsi", "index_cast")
_LOGIC = {"andi": z3.And, "ori": z3.Or, "xori": z3.Xor}


def term_of(question: Question, op: Operation, name: str, bits: int, given: int, values: Sequence[Term]) -> Term | None:
    """An operation's result.

    Args:
        question: takes its facts.
        op: the operation.
        name: its name in `arith`.
        bits: of its result; 1 for a truth value.
        given: bits of its operands.
        values: its operands' terms.

    Returns:
        None where there is no term: bitwise operations on numbers that are not known.
    """
    if name == "select":
        return z3.If(*values)
    if name == "cmpi":
        return _compared(op, given, *values)
    if given == 1:
        return _of_truth(name, *values)
    if bits == 1:
        return None
    exact = _exact(question, name, given, *values)
    return None if exact is None else question.integer(op, exact, bits)


def _compared(op: Operation, given: int, left: Term, right: Term) -> Term | None:
    predicate = property_of(op, "predicate")
    assert isinstance(predicate, IntegerAttr)
    number = predicate.value.data
    if given == 1:
        return {0: left == right, 1: z3.Xor(left, right)}.get(number)
    if number >= _FIRST_UNSIGNED:
        left, right, number = _unsigned(left, given), _unsigned(right, given), number - 4
    return (left == right, left != right, left < right, left <= right, left > right, left >= right)[number]


def _of_truth(name: str, *values: Term) -> Term | None:
    if name in _LOGIC:
        return _LOGIC[name](*values)
    numbers = {"extui": 1, "extsi": -1, "index_cast": -1, "index_castui": 1}
    return z3.If(values[0], z3.IntVal(numbers[name]), z3.IntVal(0)) if name in numbers else None


def _exact(question: Question, name: str, bits: int, left: Term, right: Term = None) -> Term | None:
    """The result as if integers had any size."""
    if name in _SAME or name == "trunci":
        return left
    if name in ("extui", "index_castui"):
        return _unsigned(left, bits)
    if name in ("divui", "remui", "minui", "maxui", "ceildivui"):
        left, right = _unsigned(left, bits), _unsigned(right, bits)
        name = name.replace("u", "s")
    match name:
        case "addi":
            return left + right
        case "subi":
            return left - right
        case "muli":
            return left * right
        case "minsi":
            return z3.If(left < right, left, right)
        case "maxsi":
            return z3.If(left > right, left, right)
        case "divsi":
            return question.divided(left, right)[0]
        case "remsi":
            return question.divided(left, right)[1]
        case "floordivsi" | "ceildivsi":
            quotient, rest = question.divided(left, right)
            down, away = name == "floordivsi", (rest > 0) == (right > 0)
            return quotient + z3.If(z3.And(rest != 0, z3.Not(away) if down else away), -1 if down else 1, 0)
    return _of_bits(name, bits, left, right)


def _of_bits(name: str, bits: int, left: Term, right: Term) -> Term | None:
    """Shifts by a known number, and the lowest bits of a number."""
    right = z3.simplify(right) if right is not None else None
    if right is None or not z3.is_int_value(right) or right.as_long() < 0:
        return None
    number = right.as_long()
    match name:
        case "shli" if number < bits:
            return left * 2**number
        case "shrsi" if number < bits:
            return left / 2**number
        case "shrui" if number < bits:
            return _unsigned(left, bits) / 2**number
        case "andi" if number & (number + 1) == 0:
            return left % (number + 1)
    return None


def _unsigned(term: Term, bits: int) -> Term:
    return z3.If(term < 0, term + 2**bits, term)
