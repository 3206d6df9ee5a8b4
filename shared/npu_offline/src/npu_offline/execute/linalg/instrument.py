"""Adds calls of the runtime to a lowered kernel, which report every access to global memory.

The pass works on the LLVM dialect. It follows each pointer from the kernel's arguments through memref descriptors, address
arithmetic, branches and the stack slots that descriptors are passed in. A DMA becomes a call of the runtime that names the
arguments on both sides; any other access gets a call before it. A pointer that cannot be followed is an error, so that no
access is missed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from xdsl.dialects.builtin import DenseArrayBase, IntegerAttr, IntegerType, SymbolRefAttr, UnregisteredAttr, i32, i64
from xdsl.ir import Attribute, Block, Operation, SSAValue
from xdsl.rewriter import InsertPoint, Rewriter

from ...errors import UnsupportedError
from ...module.mlir import make, name_of, symbol_of

LOCAL, UNKNOWN = -1, -2  # as in runtime.h, with the accesses below
LOAD, STORE, UPDATE = 0, 1, 2

_CARRIERS = {"llvm.insertvalue", "llvm.extractvalue", "llvm.select", "llvm.bitcast"}
_BRANCHES = {"llvm.br", "llvm.cond_br"}
_COPIES = {"llvm.intr.memcpy", "llvm.intr.memmove"}
_FOLLOWED = _CARRIERS | _BRANCHES | {"llvm.getelementptr", "llvm.ptrtoint", "llvm.icmp"}
_RENAMED = {"aligned_alloc": "npu_offline_alloc", "free": "npu_offline_free"}
_ACCESSES = {"llvm.load": (LOAD, 0), "llvm.store": (STORE, 1), "llvm.atomicrmw": (UPDATE, 0), "llvm.cmpxchg": (UPDATE, 0)}
_BYTES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "f16": 2, "bf16": 2, "f32": 4, "f64": 8, "!llvm.ptr": 8}


def instrument(kernel: Operation, pointers: Sequence[SSAValue]) -> None:
    """Rewrite the `llvm.func` of a kernel in place.

    Args:
        kernel: the function.
        pointers: its pointer parameters, two per memref (allocated and aligned), so that the argument index is the
            position halved.

    Raises:
        UnsupportedError: a global pointer cannot be followed through an operation.
    """
    blocks = list(kernel.regions[0].blocks)
    provenance = _Provenance(blocks, {value: position // 2 for position, value in enumerate(pointers)})
    for block in blocks:
        for op in list(block.ops):
            _rewrite(op, provenance)


class _Provenance:
    """The arguments that each value may point into, and each pointer kept in a stack slot, as bit sets."""

    def __init__(self, blocks: Iterable[Block], arguments: dict[SSAValue, int]) -> None:
        self._of = {value: 1 << index for value, index in arguments.items()}
        self._inside: dict[SSAValue, int] = {}
        self._changed = True
        while self._changed:
            self._changed = False
            for block in blocks:
                for op in block.ops:
                    self._visit(op)

    def of(self, value: SSAValue) -> int:
        """The index of the one argument that `value` points into, else LOCAL or UNKNOWN."""
        return _index(self._of.get(value, 0))

    def inside(self, slot: SSAValue) -> int:
        """The same for what is stored in a stack slot."""
        return _index(self._inside.get(slot, 0))

    def _visit(self, op: Operation) -> None:
        name = name_of(op)
        if name in _CARRIERS:
            for operand in op.operands:
                self._flow(operand, op.results[0])
        elif name == "llvm.getelementptr":
            self._flow(op.operands[0], op.results[0])
        elif name == "llvm.store":
            value, slot = op.operands
            self._grow(self._inside, slot, self._of.get(value, 0) | self._inside.get(value, 0))
        elif name == "llvm.load" and _is_address(op.results[0]):
            self._grow(self._of, op.results[0], self._inside.get(op.operands[0], 0))
        elif name in _BRANCHES:
            for operands, block in _successors(op):
                for operand, argument in zip(operands, block.args, strict=True):
                    self._flow(operand, argument)

    def _flow(self, source: SSAValue, target: SSAValue) -> None:
        if _is_address(target):
            self._grow(self._of, target, self._of.get(source, 0))
            self._grow(self._inside, target, self._inside.get(source, 0))

    def _grow(self, sets: dict[SSAValue, int], value: SSAValue, more: int) -> None:
        if more & ~sets.get(value, 0):
            sets[value] = sets.get(value, 0) | more
            self._changed = True


def _index(arguments: int) -> int:
    if not arguments:
        return LOCAL
    return UNKNOWN if arguments & (arguments - 1) else arguments.bit_length() - 1


def _is_address(value: SSAValue) -> bool:
    return isinstance(value.type, UnregisteredAttr) and value.type.attr_name.data in ("llvm.ptr", "llvm.struct")


def _successors(op: Operation) -> list[tuple[Sequence[SSAValue], Block]]:
    if name_of(op) == "llvm.br":
        return [(op.operands, op.successors[0])]
    segments = op.properties["operandSegmentSizes"]
    assert isinstance(segments, DenseArrayBase)
    condition, if_true, _ = segments.get_values()
    middle = int(condition) + int(if_true)
    return [(op.operands[1:middle], op.successors[0]), (op.operands[middle:], op.successors[1])]


def _is_of_a_constant(op: Operation) -> bool:
    """Whether an address is the placeholder number that MLIR writes for a constant tensor's allocation."""
    number = op.operands[0].owner
    return isinstance(number, Operation) and name_of(number) == "llvm.mlir.constant"


def _rewrite(op: Operation, provenance: _Provenance) -> None:
    name = name_of(op)
    if name == "llvm.inttoptr" and not _is_of_a_constant(op):
        raise UnsupportedError("the emulator cannot follow an address that was made from an integer")
    if name == "llvm.call":
        _rewrite_call(op, provenance)
    elif name in _COPIES:
        target, source = (provenance.of(operand) for operand in op.operands[:2])
        if (target, source) != (LOCAL, LOCAL):
            _replace(op, "npu_offline_move", op.operands, (target, source))
    elif name in _ACCESSES:
        access, position = _ACCESSES[name]
        argument = provenance.of(op.operands[position])
        if argument != LOCAL:
            value = op.operands[0] if access == STORE else op.results[0]
            _insert_touch(op, op.operands[position], _size(value.type), access, argument)
    elif name not in _FOLLOWED and any(provenance.of(operand) != LOCAL for operand in op.operands):
        raise UnsupportedError(f"the emulator cannot follow global memory through {name}")


def _rewrite_call(op: Operation, provenance: _Provenance) -> None:
    callee = symbol_of(op, "callee")
    if callee == "memrefCopy":
        _replace(op, "npu_offline_copy", op.operands, [provenance.inside(slot) for slot in op.operands[1:]])
    elif callee in _RENAMED:
        op.properties["callee"] = SymbolRefAttr(_RENAMED[callee])
    elif any(provenance.of(operand) != LOCAL for operand in op.operands):
        raise UnsupportedError(f"the emulator cannot follow global memory into @{callee}")


def _size(kind: Attribute) -> int:
    try:
        return _BYTES[str(kind)]
    except KeyError:
        raise UnsupportedError(f"the emulator cannot count an access to a {kind}") from None


def _constant(value: int, kind: IntegerType) -> Operation:
    return make("llvm.mlir.constant", results=[kind], value=IntegerAttr(value, kind))


def _replace(op: Operation, callee: str, operands: Sequence[SSAValue], arguments: Iterable[int]) -> None:
    indices = [_constant(argument, i32) for argument in arguments]
    call = make("llvm.call", [*operands, *(index.results[0] for index in indices)], callee=SymbolRefAttr(callee))
    Rewriter.replace_op(op, [*indices, call], new_results=[])


def _insert_touch(op: Operation, address: SSAValue, size: int, access: int, argument: int) -> None:
    constants = [_constant(size, i64), _constant(access, i32), _constant(argument, i32)]
    operands = [address, *(constant.results[0] for constant in constants)]
    call = make("llvm.call", operands, callee=SymbolRefAttr("npu_offline_touch"))
    Rewriter.insert_op([*constants, call], InsertPoint.before(op))
