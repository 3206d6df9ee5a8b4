"""Rules on what loops do besides their work, and on how a launch fills the chip."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from xdsl.dialects.builtin import MemRefType, TensorType
from xdsl.ir import Operation

from ..launches import MAX_PROGRAMS
from ..module.mlir import name_of
from ..module.operations import operation_of
from ..module.plan import addresses_of, in_innermost_loop
from ..module.shapes import space_of
from .rules import Compiled, Rule
from .view import kernel_of, loops_around


def fill_in_loop(compiled: Compiled) -> Iterator[str]:
    """A load whose mask statically leaves out a part of the tile fills the whole tile first, in every iteration. A tile as
    wide as the row needs no mask; a tail known at run time only is filled when it is taken."""
    for op in kernel_of(compiled.linalg).walk():
        if name_of(op) == "linalg.fill" and isinstance(op.operands[-1].type, MemRefType) and loops_around(op):
            branch = op.parent_op()
            rare = branch is not None and name_of(branch) == "scf.if"
            if not rare:
                yield f"a tile of {'x'.join(map(str, op.operands[-1].type.get_shape()))} is filled before it is loaded"


def scalar_reduction(compiled: Compiled) -> Iterator[str]:
    """A reduction to one number leaves the vector unit: it is written, waited for, read by the scalar unit and sent back.
    Two rows a tile keep it in vectors. Reported where the Unified Buffer has room for twice the tile."""
    report = compiled.report
    if not report.fits or 2 * report.ub.used > report.ub.available:
        return
    for op in kernel_of(compiled.linalg).walk():
        if name_of(op) == "linalg.reduce" and loops_around(op) and isinstance(op.operands[-1].type, TensorType):
            shape = op.operands[0].type.get_shape()  # type: ignore[attr-defined]
            if prod(op.operands[-1].type.get_shape()) == 1 and prod(shape) > 1:
                used = f"{report.ub.used} of {report.ub.available} bytes of UB used"
                yield f"a tile of {'x'.join(map(str, shape))} is reduced to one number in a loop, {used}"


def single_buffer(compiled: Compiled) -> Iterator[str]:
    """With one address for a tile, the next transfer waits until the tile has been used; with two they overlap. Version
    1.2.0 gives up the second address where the tile is too large and says so in a note only, so that the addresses in the
    final module are looked at. A launch that asks for no double buffering is left alone."""
    if dict(compiled.subject.options).get("multibuffer") is False or compiled.report.l0c.used:
        return
    if compiled.report.double_buffered is False:
        note = compiled.report.message.partition("\n")[0]
        yield f"transfers in a loop have one buffer{': ' + note if note else ''}"


def cube_pipelining(compiled: Compiled) -> Iterator[str]:
    """A matrix product runs at its rate only while the next operands move into L1: each operand needs two addresses there,
    whatever the launch asked for."""
    if compiled.final is None or not compiled.report.l0c.used:
        return
    for op in compiled.final.walk():
        operation = operation_of(op)
        if operation is None or not any(space_of(value.type) == "gm" for value in operation.reads):
            continue
        for value in operation.writes:
            if space_of(value.type) == "l1" and in_innermost_loop(op) and len(addresses_of(value)) < 2:  # noqa: PLR2004
                yield f"an operand of {_shape(op, value.type)} has one buffer in L1"


def _shape(op: Operation, kind: object) -> str:
    return "x".join(str(size) if size >= 0 else "?" for size in kind.get_shape()) if isinstance(kind, MemRefType) else "?"


def grid(compiled: Compiled) -> Iterator[str]:
    """A core takes one program after another, each with a start of its own: more programs than cores start in rounds, and
    more than 65535 are refused. Launch as many as there are cores, and stride over the tiles."""
    programs = prod(compiled.subject.grid)
    cube = compiled.report.l0c.used > 0
    cores = compiled.chip.cube_cores if cube else compiled.chip.vector_cores
    if programs > cores:
        limit = f", and at most {MAX_PROGRAMS} can be launched" if programs > MAX_PROGRAMS else ""
        yield f"{programs} programs on {cores} {'cube' if cube else 'vector'} cores{limit}"


RULES = (
    Rule("fill-in-loop", fill_in_loop),
    Rule("scalar-reduction", scalar_reduction),
    Rule("single-buffer", single_buffer),
    Rule("cube-pipelining", cube_pipelining),
    Rule("grid", grid),
)
