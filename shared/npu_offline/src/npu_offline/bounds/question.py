"""What a solver is asked about one access: facts, and the terms of integers with what may be too large for them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import z3
from xdsl.ir import Operation

Term: TypeAlias = Any
"""An integer or a truth value of z3."""
Index: TypeAlias = tuple[Term, ...]
SOON, LATE = 3_000_000, 60_000_000
"""Steps that a solver may take for a lemma, about a second, and for a verdict, half a minute. Steps repeat; times do not."""


@dataclass(frozen=True, eq=False)
class Value:
    """A number, or a tensor of numbers by its elements.

    Attributes:
        shape: empty of a number.
        element: the term at an index, with its facts in the question.
    """

    shape: tuple[int, ...]
    element: Callable[[Question, Index], Term]


class Result(NamedTuple):
    """What an operation computes, and how many bits it has for that.

    Attributes:
        op: the operation.
        term: its result.
        bits: of its type.
        facts: how many facts of the question hold before it is computed: conditions of branches may depend on it.
    """

    op: Operation
    term: Term
    bits: int
    facts: int

    @property
    def overflows(self) -> Term:
        """Whether the number is too large for its bits."""
        return z3.Or(self.term < -(2 ** (self.bits - 1)), self.term >= 2 ** (self.bits - 1))


class Unknown(NamedTuple):
    """A term that nothing is known about but its type.

    Attributes:
        term: a constant of z3.
        name: whose value it is.
        declared: whether the user gave its range: any value in it may then occur.
    """

    term: Term
    name: str
    declared: bool


class Quotient(NamedTuple):
    """A division, rounded down, by a positive number."""

    left: Term
    right: Term
    quotient: Term
    rest: Term


class Question:
    """Facts, and terms that belong together: an index of a value has the same term wherever it is used.

    Attributes:
        facts: what holds for all terms.
        results: of integer operations, operands first: a result is exact if nothing before it overflows.
        unknowns: terms that depend on data.
    """

    def __init__(
        self, facts: Collection[Term], quotients: Collection[Quotient] = (), wrapping: Collection[Operation] = ()
    ) -> None:
        """
        Args:
            facts: what is known.
            quotients: of which the facts speak.
            wrapping: operations whose results are taken modulo two to the power of their bits; others are taken exactly.
        """
        self.facts = list(facts)
        self.results: list[Result] = []
        self.unknowns: list[Unknown] = []
        self._wrapping = wrapping
        self._kept: dict[tuple[int, ...], tuple[Term, object]] = {}
        self._quotients, self._signed = list(quotients), list[Quotient]()

    def at(self, value: Value, index: Index = ()) -> Term:
        """The term of a value's element."""
        key = (id(value), *(each.get_id() for each in index))
        if key not in self._kept:
            self._kept[key] = value.element(self, index), (value, index)
        return self._kept[key][0]

    def wraps(self, op: Operation) -> bool:
        """Whether an operation's results are taken modulo two to the power of their bits."""
        return op in self._wrapping

    def integer(self, op: Operation, term: Term, bits: int) -> Term:
        """The term of an operation's result."""
        term = z3.simplify(term)
        if z3.is_int_value(term) and -(2 ** (bits - 1)) <= term.as_long() < 2 ** (bits - 1):
            return term
        self.results.append(Result(op, term, bits, len(self.facts)))
        if not self.wraps(op):
            return term
        wrapped = term - z3.FreshInt("turns") * 2**bits
        self.facts += [wrapped >= -(2 ** (bits - 1)), wrapped < 2 ** (bits - 1)]
        return wrapped

    def unknown(self, name: str, bits: int, between: tuple[Term, Term] | None = None) -> Term:
        """A new term for data: a truth value of one bit, else an integer of the range, or of any value of its type."""
        term = z3.FreshBool("data") if bits == 1 else z3.FreshInt("data")
        self.unknowns.append(Unknown(term, name, between is not None))
        if bits > 1:
            first, stop = between or (-(2 ** (bits - 1)), 2 ** (bits - 1))
            self.facts += [term >= first, term < stop]
        return term

    def divided(self, left: Term, right: Term) -> tuple[Term, Term]:
        """The quotient, rounded towards zero, and the remainder; anything where the divisor is zero."""
        left, right = z3.simplify(left), z3.simplify(right)
        plain = self._holds(z3.And(left >= 0, right > 0))
        known = self._quotients if plain else self._signed
        for each in known:
            if each.left.eq(left) and each.right.eq(right):
                return each.quotient, each.rest
        quotient, rest = z3.FreshInt("quotient"), z3.FreshInt("rest")
        known.append(Quotient(left, right, quotient, rest))
        exact = left == quotient * right + rest
        if plain:
            self.facts += [exact, rest >= 0, rest < right, quotient >= 0, quotient <= left]
        else:
            size = z3.If(right >= 0, right, -right)
            signed = z3.If(left >= 0, z3.And(rest >= 0, rest < size), z3.And(rest <= 0, rest > -size))
            self.facts.append(z3.Implies(right != 0, z3.And(exact, signed)))
        return quotient, rest

    def _holds(self, claim: Term) -> bool:
        """Whether the facts so far imply a claim, as far as a solver sees soon."""
        return is_impossible([*self.facts, z3.Not(claim)], SOON)


def solver_of(facts: Collection[Term], steps: int = LATE) -> Any:
    """A solver that knows facts, and gives up after so many steps."""
    solver = z3.Solver()
    solver.set("rlimit", steps)
    solver.add(*facts)
    return solver


def is_impossible(facts: Collection[Term], steps: int = LATE) -> bool:
    """Whether facts contradict each other, as far as a solver sees in so many steps."""
    return bool(solver_of(facts, steps).check() == z3.unsat)
