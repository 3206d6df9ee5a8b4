"""Tensors of Linalg IR whose memory is read as such, by atomic updates for one: they have to keep it."""

from __future__ import annotations

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue
from xdsl.rewriter import InsertPoint, Rewriter

from ...module.mlir import name_of

_TO_MEMORY, _TO_TENSOR = "bufferization.to_memref", "bufferization.to_tensor"
_VIEWS = {"memref.subview", "memref.cast", "memref.reinterpret_cast", "memref.collapse_shape", "memref.expand_shape"}


def keep_tensors_whose_memory_is_read(module: ModuleOp) -> None:
    """Let no operation overwrite a tensor whose memory is read as such.

    Bufferization looks for later readers of a tensor and does not count those of its memory. So each of these gets a
    `to_memref` of its own, right before it; and a tensor that was made of memory is not writable where that is read.
    """
    for op in reversed(list(module.walk())):
        if name_of(op) == _TO_MEMORY or (name_of(op) in _VIEWS and _is_of_tensor(op.operands[0])):
            for use in list(op.results[0].uses):
                view = op.clone()
                Rewriter.insert_op(view, InsertPoint.before(use.operation))
                use.operation.operands[use.index] = view.results[0]
            Rewriter.erase_op(op)
        elif name_of(op) == _TO_TENSOR and _is_read(op.operands[0]):
            op.properties.pop("writable", None)


def _is_of_tensor(memory: SSAValue) -> bool:
    owner = memory.owner
    if not isinstance(owner, Operation):
        return False
    return name_of(owner) == _TO_MEMORY or (name_of(owner) in _VIEWS and _is_of_tensor(owner.operands[0]))


def _is_read(memory: SSAValue) -> bool:
    """Whether an operation on memory has it for an operand and not for its result, which is the last operand."""
    for use in memory.uses:
        reader = use.operation
        if name_of(reader) in _VIEWS:
            if _is_read(reader.results[0]):
                return True
        elif name_of(reader) != _TO_TENSOR and use.index < len(reader.operands) - 1:
            return True
    return False
