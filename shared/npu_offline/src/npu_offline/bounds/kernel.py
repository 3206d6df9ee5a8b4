"""Verdicts about all accesses of a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import z3

from ..errors import OfflineError
from ..module.mlir import name_of, parse, symbol_of
from ..module.places import lines_by_operation
from ..toolchain.compilation import front_end_of
from .expressions import term_of
from .origins import Origins
from .pointers import Pointer
from .proof import Size, Sizes, Verdict, decide, is_possible
from .question import Quotient, Term, Value
from .results import Results
from .subject import Subject
from .walk import Walk

if TYPE_CHECKING:
    from xdsl.ir import Operation

MOST_PROGRAMS = 65535
"""The most programs along an axis of a grid that a chip launches."""


def prove(subject: Subject) -> Iterator[Verdict]:
    """A verdict about each load, store and atomic update, in the order of the kernel's TTIR.

    Raises:
        OfflineError: an expression is wrong, or no sizes fulfil the conditions.
    """
    sizes = sizes_of(subject)
    if not is_possible(sizes):
        raise OfflineError(f"no sizes fulfil the ranges, the conditions and a grid of 1 to {MOST_PROGRAMS} programs an axis")
    record = subject.record
    arguments = [_argument(name, sizes) for name in record.signature if name not in record.constants]
    grid = [(_constant(number), _constant(count)) for number, count in zip(sizes.programs, sizes.grid, strict=True)]
    contents = {name: (_constant(first), _constant(stop)) for name, (first, stop) in sizes.contents.items()}
    _, ttir, _ = front_end_of(record)
    function = _function(ttir, record.name)
    origins = Origins(function, lines_by_operation(ttir))
    walk = Walk(Results(grid, contents, origins), origins)
    walk.through(function, arguments)
    for access in walk.accesses:
        yield decide(access, sizes, origins.place)


def sizes_of(subject: Subject) -> Sizes:
    """The sizes of a subject as terms, with all that holds for them."""
    named = {name: Size(z3.Int(name), first) for name, (first, _) in subject.ranges.items()}
    facts: list[Term] = []
    quotients: list[Quotient] = []
    known = {name: size.term for name, size in named.items()}
    for name, (first, stop) in subject.ranges.items():
        facts += [known[name] >= first, known[name] < stop]
    known |= {name: z3.IntVal(value) for name, value in subject.record.constants.items() if type(value) is int}

    def read(what: str, text: str) -> Term:
        return term_of(what, text, known, facts, quotients)

    numbers = {}
    for name, text in subject.numbers.items():
        numbers[name] = read(name, text)
        bits = int(subject.record.signature[name][1:])
        facts += [numbers[name] >= -(2 ** (bits - 1)), numbers[name] < 2 ** (bits - 1)]
    known |= {name: term for name, term in numbers.items() if name not in known}
    facts += [read("--where", text) for text in subject.conditions]
    grid = [read("--grid", text) for text in subject.grid] + [z3.IntVal(1)] * (3 - len(subject.grid))
    programs = [z3.Int(f"program {axis}") for axis in "xyz"]
    for program, count in zip(programs, grid, strict=True):
        facts += [count >= 1, count <= MOST_PROGRAMS, program >= 0, program < count]
    extents = {name: read(name, text) for name, text in subject.extents.items()}
    facts += [extent >= 0 for extent in extents.values()]
    contents = {name: (read(name, first), read(name, stop)) for name, (first, stop) in subject.contents.items()}
    return Sizes(named, numbers, extents, contents, grid, programs, facts, quotients)


def _function(ttir: str, name: str) -> Operation:
    from ..toolchain.ttir import generic_form

    functions = [op for op in parse(generic_form(ttir)).walk() if name_of(op) == "tt.func"]
    return next(op for op in functions if symbol_of(op, "sym_name") == name)


def _argument(name: str, sizes: Sizes) -> Value | Pointer | None:
    if name in sizes.extents:
        return Pointer(name, _constant(z3.IntVal(0)))
    return _constant(sizes.numbers[name]) if name in sizes.numbers else None


def _constant(term: Term) -> Value:
    return Value((), lambda *_: term)
