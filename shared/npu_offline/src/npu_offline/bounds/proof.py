"""Decides about an access: in bounds for all sizes, or out of bounds for some, or refused with the reason."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import z3
from xdsl.ir import Operation

from .pointers import Access
from .question import SOON, Index, Question, Quotient, Result, Term, is_impossible, solver_of

_MOST_QUESTIONS = 150  # about smaller counterexamples


class Size(NamedTuple):
    """A size's term, and the first number of its range."""

    term: Term
    first: int


@dataclass(frozen=True)
class Sizes:
    """For which sizes a kernel is judged, as terms.

    Attributes:
        named: sizes, in the order in which they are given.
        numbers: integer arguments by name.
        extents: by tensor, how many elements it has.
        contents: by tensor, the least of its integers and the number behind the largest.
        grid: programs in x, y and z.
        programs: the number of the program along each.
        facts: what holds for all of them.
        quotients: of which the facts speak.
    """

    named: Mapping[str, Size]
    numbers: Mapping[str, Term]
    extents: Mapping[str, Term]
    contents: Mapping[str, tuple[Term, Term]]
    grid: Sequence[Term]
    programs: Sequence[Term]
    facts: Sequence[Term]
    quotients: Sequence[Quotient]


@dataclass(frozen=True)
class Counterexample:
    """Sizes for which an access goes wrong.

    Attributes:
        sizes, numbers, extents, grid: their values, as in `Sizes`.
        program: which program it is.
        element: which element of the tensor it accesses.
        data: what integers of which tensors lead to it.
        overflow: the operation whose result is too large for its type; nothing if there is none.
    """

    sizes: Mapping[str, int]
    numbers: Mapping[str, int]
    extents: Mapping[str, int]
    grid: Sequence[int]
    program: tuple[int, ...]
    element: int
    data: Mapping[str, int]
    overflow: str


@dataclass(frozen=True)
class Verdict:
    """About one access.

    Attributes:
        kind: "proved", "out of bounds", "overflow" (of an offset that may still be in bounds) or "refused".
        access: which.
        reason: why it was refused, or what else there is to say.
        counterexample: of the two in the middle.
    """

    kind: Literal["proved", "out of bounds", "overflow", "refused"]
    access: Access
    reason: str = ""
    counterexample: Counterexample | None = None


def is_possible(sizes: Sizes) -> bool:
    """Whether any sizes fulfil all conditions."""
    return not is_impossible(sizes.facts)


def decide(access: Access, sizes: Sizes, place: Callable[[Operation], str]) -> Verdict:
    """The verdict about an access.

    Args:
        access: which.
        sizes: for which it is judged.
        place: the line of an operation.
    """
    if access.refused or access.offset is None:
        return Verdict("refused", access, access.refused)
    asked = _Asked(access, sizes, ())
    wrapping: set[Operation] = set()
    while found := _overflowing(asked, wrapping):
        wrapping |= found
        asked = _Asked(access, sizes, wrapping)
    outside = z3.Or(asked.offset < 0, asked.offset >= sizes.extents[access.argument])
    verdict = _answered(asked, outside, "out of bounds", place, wrapping)
    if verdict is None and wrapping:
        too_large = [result.overflows for result in asked.question.results if result.op in wrapping]
        verdict = _answered(asked, z3.Or(*too_large), "overflow", place, wrapping)
    if verdict is None and is_impossible([*asked.question.facts, asked.active]):
        return Verdict("proved", access, "no program gets here")
    return verdict or Verdict("proved", access)


class _Asked:
    """An access as a question: the terms of one element of its tile."""

    def __init__(self, access: Access, sizes: Sizes, wrapping: Collection[Operation]) -> None:
        assert access.offset is not None
        self.access, self.sizes = access, sizes
        self.question = Question(sizes.facts, sizes.quotients, wrapping)
        self.index: Index = tuple(z3.FreshInt("index") if size > 1 else z3.IntVal(0) for size in access.offset.shape)
        inside = [z3.And(each >= 0, each < size) for each, size in zip(self.index, access.offset.shape, strict=True)]
        self.question.facts += inside
        for condition in access.path:
            self.question.facts.append(self.question.at(condition))
        mask = access.mask
        self.active = z3.BoolVal(True) if mask is None else self.question.at(mask, self.index if mask.shape else ())
        self.offset = self.question.at(access.offset, self.index)


def _overflowing(asked: _Asked, known: Collection[Operation]) -> set[Operation]:
    """Operations whose results may be too large for their bits, of those that are not known to be so."""
    found: set[Operation] = set()
    for result in asked.question.results:
        if result.op not in known and result.op not in found:
            if not is_impossible([*asked.question.facts[: result.facts], result.overflows]):
                found.add(result.op)
    return found


def _answered(
    asked: _Asked,
    wrong: Term,
    kind: Literal["out of bounds", "overflow"],
    place: Callable[[Operation], str],
    wrapping: Collection[Operation],
) -> Verdict | None:
    """None where nothing can go wrong; else the smallest counterexample that is found soon."""
    solver = solver_of([*asked.question.facts, asked.active, wrong])
    answer = solver.check()
    if answer == z3.unsat:
        return None
    if answer == z3.unknown:
        reason = "the solver gives up: narrower ranges, or fixed sizes, may help"
        return Verdict("refused", asked.access, reason)
    data = dict.fromkeys(each.name for each in asked.question.unknowns if not each.declared)
    if data:
        return Verdict("refused", asked.access, f"it depends on {' and on '.join(data)}")
    counted = [(each, 0) for each in (*asked.sizes.programs, *asked.index)]
    model = _smallest(solver, [*asked.sizes.named.values(), *counted])
    return Verdict(kind, asked.access, counterexample=_counterexample(asked, model, place, wrapping))


def _counterexample(
    asked: _Asked, model: Any, place: Callable[[Operation], str], wrapping: Collection[Operation]
) -> Counterexample:
    sizes, question = asked.sizes, asked.question

    def values(terms: Mapping[str, Term]) -> dict[str, int]:
        return {name: _number(model, term) for name, term in terms.items()}

    overflows = (result for result in question.results if result.op in wrapping)
    found = next((each for each in overflows if z3.is_true(model.eval(each.overflows, model_completion=True))), None)
    return Counterexample(
        values({name: size.term for name, size in sizes.named.items()}),
        values(sizes.numbers),
        values(sizes.extents),
        [_number(model, each) for each in sizes.grid],
        tuple(_number(model, each) for each in sizes.programs),
        _number(model, asked.offset),
        values({each.name: each.term for each in question.unknowns}),
        _overflow(found, _number(model, found.term), place) if found else "",
    )


def _overflow(result: Result, value: int, place: Callable[[Operation], str]) -> str:
    return f"{value:,} in {place(result.op)} is too large for i{result.bits}"


def _smallest(solver: Any, terms: Sequence[tuple[Term, int]]) -> Any:
    """A model in which the first terms are as small as can be found soon, then those that follow.

    Args:
        solver: has a model.
        terms: each with a number that it is not below.
    """
    model, left = solver.model(), _MOST_QUESTIONS
    solver.set("rlimit", SOON)
    for term, low in terms:
        best = _number(model, term)
        while low < best and left:
            left -= 1
            middle = (low + best) // 2
            solver.push()
            solver.add(term <= middle)
            if solver.check() == z3.sat:
                model = solver.model()
                best = _number(model, term)
            else:
                low = middle + 1
            solver.pop()
        solver.add(term <= best)
    return model


def _number(model: Any, term: Term) -> int:
    return int(model.eval(term, model_completion=True).as_long())
