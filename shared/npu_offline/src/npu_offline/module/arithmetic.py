"""Scalar arithmetic of modules: the dialect `arith`, or the same operations in the dialect `llvm` under other names."""

from __future__ import annotations

from xdsl.ir import Operation

from .mlir import name_of

COMPARISONS = ("==", "!=", "<", "<=", ">", ">=", "<", "<=", ">", ">=")
"""By the value of arith.cmpi's predicate; from 6 on the operands are unsigned."""

_LLVM_NAMES = {  # llvm's name, arith's
    **{name: f"{name}i" for name in ("add", "sub", "mul", "and", "or", "xor")},
    **{f"{sign}{name}": f"{name}{sign}i" for name in ("div", "rem") for sign in "su"},
    **{f"intr.{sign}{name}": f"{name}{sign}i" for name in ("min", "max") for sign in "su"},
    "shl": "shli",
    "ashr": "shrsi",
    "lshr": "shrui",
    "sext": "extsi",
    "zext": "extui",
    "trunc": "trunci",
    "icmp": "cmpi",
    "mlir.constant": "constant",
}


def arithmetic_of(op: Operation) -> tuple[str, str]:
    """An operation's dialect and name; an operation of `llvm` has the name that `arith` gives it."""
    dialect, _, name = name_of(op).partition(".")
    return ("arith", _LLVM_NAMES.get(name, name)) if dialect == "llvm" else (dialect, name)
