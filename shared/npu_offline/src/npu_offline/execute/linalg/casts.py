"""What MLIR's passes and LLVM leave open: casts of NaN to integers, which are 0 as in final modules; casts between
operations; quotients by 0, which would end the process."""

from __future__ import annotations

from xdsl.dialects.builtin import (
    BFloat16Type,
    Float16Type,
    IntegerAttr,
    IntegerType,
    ModuleOp,
    TensorType,
    f32,
    i1,
    i32,
    i64,
)
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.rewriter import InsertPoint, Rewriter

from ...module.mlir import make, name_of, parse_attribute

_ROUNDED = {"arith.addf", "arith.subf", "arith.mulf", "arith.divf", "arith.remf"}  # and all of math
_CASTS = ("arith.fptosi", "arith.fptoui")
_QUOTIENTS = ("arith.divsi", "arith.remsi", "arith.divui", "arith.remui")
_EQUAL = IntegerAttr(0, i64)  # the predicate "eq" of arith.cmpi
_UNORDERED = IntegerAttr(14, i64)  # the predicate "uno" of arith.cmpf


def define_casts(module: ModuleOp) -> None:
    """Make NaN 0, and take casts to fewer bits than 32 by way of 32: LLVM would saturate on one host and not on another."""
    for op in list(module.walk()):
        if name_of(op) in _CASTS:
            _define(op)


def define_quotients(module: ModuleOp) -> None:
    """Divide by 1 where the divisor is 0, and the least number, whose quotient by -1 is itself, where it is -1."""
    for op in list(module.walk()):
        if name_of(op) in _QUOTIENTS:
            _guard(op)


def _guard(op: Operation) -> None:
    left, right = op.operands
    new: list[Operation] = []

    def constant(number: int) -> SSAValue:
        value = parse_attribute(f"{f'dense<{number}>' if isinstance(right.type, TensorType) else number} : {right.type}")
        new.append(make("arith.constant", results=[right.type], value=value))
        return new[-1].results[0]

    def made(name: str, *operands: SSAValue, kind: Attribute, **properties: Attribute) -> SSAValue:
        new.append(make(name, operands, [kind], **properties))
        return new[-1].results[0]

    bits = _like(right.type, i1)
    undefined = made("arith.cmpi", right, constant(0), kind=bits, predicate=_EQUAL)
    element = right.type.get_element_type() if isinstance(right.type, TensorType) else right.type
    if name_of(op).endswith("si") and isinstance(element, IntegerType):
        least = constant(-(2 ** (element.width.data - 1)))
        of_least = made("arith.cmpi", left, least, kind=bits, predicate=_EQUAL)
        by_one = made("arith.cmpi", right, constant(-1), kind=bits, predicate=_EQUAL)
        undefined = made("arith.ori", undefined, made("arith.andi", of_least, by_one, kind=bits), kind=bits)
    divisor = made("arith.select", undefined, constant(1), right, kind=right.type)
    Rewriter.insert_op(new, InsertPoint.before(op))
    op.operands = [left, divisor]


def round_each(module: ModuleOp) -> None:
    """Compute what is narrower than fp32 in fp32, and round it to nearest even after each operation.

    MLIR's passes do so too, but let two operations in one loop leave out the cast between them.
    """
    for op in list(module.walk()):
        name = name_of(op)
        if (name in _ROUNDED or name.startswith("math.")) and is_narrow(op.results[0].type):
            widen(op)


def widen(op: Operation) -> None:
    """Let an operation take and give fp32, cast its operands before it and its result behind it."""
    for place, operand in enumerate(op.operands):
        if is_narrow(operand.type):
            wide = make("arith.extf", [operand], [_like(operand.type, f32)])
            Rewriter.insert_op(wide, InsertPoint.before(op))
            op.operands[place] = wide.results[0]
    result = op.results[0]
    narrow = make("arith.truncf", [result], [result.type])
    uses = [use for use in result.uses if use.operation is not narrow]
    Rewriter.insert_op(narrow, InsertPoint.after(op))
    for use in uses:
        use.operation.operands[use.index] = narrow.results[0]
    Rewriter.replace_value_with_new_type(result, _like(result.type, f32))


def is_narrow(kind: Attribute) -> bool:
    """Whether a number's or a tensor's type is fp16 or bf16."""
    return isinstance(kind.get_element_type() if isinstance(kind, TensorType) else kind, (Float16Type, BFloat16Type))


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
    return TensorType(element, kind.get_shape(), kind.encoding) if isinstance(kind, TensorType) else element
