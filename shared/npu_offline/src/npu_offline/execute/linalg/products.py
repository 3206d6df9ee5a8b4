"""Writes products of matrices so that a host computes them fast, with the same bits.

`linalg.matmul` says nothing of the order in which the terms of an element are added; here they are added one after another,
first to last, whatever the order of the loops, and in fp32 where the result is narrower: the cube core's sums are fp32, and
rounded once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue
from xdsl.rewriter import InsertPoint, Rewriter

from ...module.mlir import make, name_of, parse_attribute
from .casts import is_narrow, widen

_PRODUCTS = {  # by the operation's name, the axes of its operands in loops over (i, k, j)
    "linalg.matmul": ("i, k, j", ("i, k", "k, j", "i, j")),
    "linalg.batch_matmul": ("b, i, k, j", ("b, i, k", "b, k, j", "b, i, j")),
}
_KINDS = {"k": "reduction"}


def order_products(module: ModuleOp) -> None:
    """Give products loops whose innermost one goes along rows, and operands of the result's type."""
    for op in list(module.walk()):
        if name_of(op) in _PRODUCTS and op.results:
            if is_narrow(op.results[0].type):
                widen(op)
            _reorder(op, *_PRODUCTS[name_of(op)])


def _reorder(op: Operation, loops: str, axes: Sequence[str]) -> None:
    left, right, before = op.operands
    assert isinstance(before.type, TensorType)
    element = before.type.get_element_type()
    wider = [_widened(op, operand, element) for operand in (left, right)]
    body = Block(arg_types=[element] * 3)
    kind = "f" if str(element).startswith(("f", "bf")) else "i"
    product = make(f"arith.mul{kind}", body.args[:2], [element])
    total = make(f"arith.add{kind}", [body.args[2], product.results[0]], [element])
    body.add_ops([product, total, make("linalg.yield", total.results)])
    properties = {
        "indexing_maps": _list(f"affine_map<({loops}) -> ({each})>" for each in axes),
        "iterator_types": _list(f"#linalg.iterator_type<{_KINDS.get(axis, 'parallel')}>" for axis in loops.split(", ")),
        "operandSegmentSizes": parse_attribute("array<i32: 2, 1>"),
    }
    new = make("linalg.generic", [*wider, before], [op.results[0].type], **properties)
    new.add_region(Region(body))
    Rewriter.replace_op(op, new)


def _list(attributes: Iterable[str]) -> Attribute:
    return parse_attribute(f"[{', '.join(attributes)}]")


def _widened(op: Operation, operand: SSAValue, element: Attribute) -> SSAValue:
    kind = operand.type
    assert isinstance(kind, TensorType)
    if kind.get_element_type() == element:
        return operand
    cast = "arith.extf" if str(element).startswith(("f", "bf")) else "arith.extsi"
    wider = make(cast, [operand], [TensorType(element, kind.get_shape(), kind.encoding)])
    Rewriter.insert_op(wider, InsertPoint.before(op))
    return wider.results[0]
