"""Turns sums of fp16 in Linalg IR into sums of fp32 that are rounded once, as the Ascend compilers do."""

from __future__ import annotations

from xdsl.dialects.builtin import Float16Type, ModuleOp, f32
from xdsl.ir import Operation
from xdsl.rewriter import Rewriter

from ...module.mlir import name_of
from .casts import widen

_BODY = ["arith.addf", "linalg.yield"]


def widen_sums(module: ModuleOp) -> None:
    """Compute every sum of an fp16 tensor in fp32."""
    for op in list(module.walk()):
        if name_of(op) == "linalg.reduce" and _is_narrow_sum(op):
            _widen(op)


def _is_narrow_sum(op: Operation) -> bool:
    block = op.regions[0].blocks[0]
    return [name_of(inner) for inner in block.ops] == _BODY and all(isinstance(a.type, Float16Type) for a in block.args)


def _widen(op: Operation) -> None:
    widen(op)
    block = op.regions[0].blocks[0]
    for argument in block.args:
        Rewriter.replace_value_with_new_type(argument, f32)
    for inner in block.ops:
        for value in inner.results:
            Rewriter.replace_value_with_new_type(value, f32)
