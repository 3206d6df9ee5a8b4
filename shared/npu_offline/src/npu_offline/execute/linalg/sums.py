"""Turns sums of fp16 in Linalg IR into sums of fp32 that are rounded once, as the Ascend compilers do."""

from __future__ import annotations

from xdsl.dialects.builtin import Float16Type, ModuleOp, TensorType, f32
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.rewriter import InsertPoint, Rewriter

from ...module.mlir import make, name_of

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
    wider = [make("arith.extf", [operand], [_wide(operand.type)]) for operand in op.operands]
    Rewriter.insert_op(wider, InsertPoint.before(op))
    op.operands = [each.results[0] for each in wider]
    result = op.results[0]
    narrow = make("arith.truncf", [result], [result.type])
    uses = [use for use in result.uses if use.operation is not narrow]
    Rewriter.insert_op(narrow, InsertPoint.after(op))
    for use in uses:
        use.operation.operands[use.index] = narrow.results[0]
    _retype(result, _wide(result.type))
    block = op.regions[0].blocks[0]
    for argument in block.args:
        _retype(argument, f32)
    for inner in block.ops:
        for value in inner.results:
            _retype(value, f32)


def _wide(kind: Attribute) -> Attribute:
    assert isinstance(kind, TensorType)
    return TensorType(f32, kind.get_shape(), kind.encoding)


def _retype(value: SSAValue, kind: Attribute) -> None:
    Rewriter.replace_value_with_new_type(value, kind)
