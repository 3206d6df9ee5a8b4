"""Flags and barriers, in C."""

from __future__ import annotations

from collections.abc import Callable

from xdsl.ir import Operation as Op

from ...errors import UnsupportedError
from ...module.mlir import name_of, property_of
from ...module.operations import PIPES
from .writer import Writer


def _flag(writer: Writer, op: Op) -> None:
    """A flag between two pipes of a core."""
    event = property_of(op, "static_event_id")
    number = writer.name(op.operands[0]) if event is None else str(event).partition("EVENT_ID")[2].strip("<> ")
    verb = name_of(op).removeprefix("hivm.hir.")
    writer.lines.append(f"{verb}({_pipe(op, 'set_pipe')}, {_pipe(op, 'wait_pipe')}, {number});")


def _across(writer: Writer, op: Op) -> None:
    """A flag between cores of both kinds."""
    flag = property_of(op, "static_flag_id")
    number = writer.name(op.operands[0]) if flag is None else str(flag).partition(" ")[0]
    if _pipe(op, "pipe") != "S":
        raise UnsupportedError(f"execution does not know the pipes of {op}")
    if name_of(op).endswith("_set"):
        writer.lines.append(f"set_cross_flag({_pipe(op, 'tpipe')}, {number});")
    else:
        writer.lines.append(f"wait_cross_flag({number});")


def _barrier(writer: Writer, op: Op) -> None:
    """A barrier of one pipe, or of all."""
    pipe = _pipe(op, "pipe")
    if pipe != "S":
        writer.lines.append(f"barrier({pipe});")


def _pipe(op: Op, name: str) -> str:
    text = str(property_of(op, name)).partition("PIPE_")[2].strip("<> ")
    if text == "ALL":
        return "PIPES"
    if text not in PIPES:
        raise UnsupportedError(f"execution does not know the pipe {text}")
    return text


SYNCHRONISATION: dict[str, Callable[[Writer, Op], None]] = {
    "hivm.hir.set_flag": _flag,
    "hivm.hir.wait_flag": _flag,
    "hivm.hir.pipe_barrier": _barrier,
    "hivm.hir.sync_block_set": _across,
    "hivm.hir.sync_block_wait": _across,
}
"""By operation: the function that writes it."""
