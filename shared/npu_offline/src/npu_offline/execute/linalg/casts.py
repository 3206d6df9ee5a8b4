"""Casts of floating-point numbers to integers, which LLVM leaves undefined for NaN: it becomes 0, as in final modules."""

from __future__ import annotations

from xdsl.dialects.builtin import IntegerAttr, IntegerType, ModuleOp, TensorType, i1, i32, i64
from xdsl.ir import Attribute, Operation
from xdsl.rewriter import InsertPoint, Rewriter

from ...module.mlir import make, name_of, parse_attribute

_CASTS = ("arith.fptosi", "arith.fptoui")
_UNORDERED = IntegerAttr(14, i64)  # the predicate "uno" of arith.cmpf


def define_casts(module: ModuleOp) -> None:
    """Make NaN 0, and take casts to fewer bits than 32 by way of 32: LLVM would saturate on one host and not on another."""
    for op in list(module.walk()):
        if name_of(op) in _CASTS:
            _define(op)


def _define(op: Operation) -> None:
    value, result = op.operands[0], op.results[0].type
    zero = parse_attribute(f"{'dense<0.0>' if isinstance(value.type, TensorType) else '0.0'} : {value.type}")
    zeros = make("arith.constant", results=[value.type], value=zero)
    is_nan = make("arith.cmpf", [value, value], [_like(result, i1)], predicate=_UNORDERED)
    number = make("arith.select", [is_nan.results[0], zeros.results[0], value], [value.type])
    new = [zeros, is_nan, number]
    element = result.get_element_type() if isinstance(result, TensorType) else result
    if isinstance(element, IntegerType) and 1 < element.width.data < 32:
        new.append(make("arith.fptosi", [number.results[0]], [_like(result, i32)]))
        new.append(make("arith.trunci", [new[-1].results[0]], [result]))
    else:
        new.append(make(name_of(op), [number.results[0]], [result]))
    Rewriter.insert_op(new, InsertPoint.before(op))
    Rewriter.replace_op(op, [], new_results=[new[-1].results[0]])


def _like(kind: Attribute, element: Attribute) -> Attribute:
    """A tensor of another element type, or that type alone."""
    return TensorType(element, kind.get_shape()) if isinstance(kind, TensorType) else element
