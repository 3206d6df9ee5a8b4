"""Buffers of a core, views of memory and scalar accesses, in C."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import ArrayAttr, DenseArrayBase, FixedBitwidthType, MemRefType
from xdsl.ir import Operation as Op
from xdsl.ir import SSAValue

from ...errors import UnsupportedError
from ...module.mlir import property_of
from ...module.shapes import SPACES, mixed, space_of
from .instructions import Instruction
from .scalars import bits_of, element_type, from_bits
from .writer import Writer, constant_of

_SAME = ("memref.cast", "memref.memory_space_cast")


def write_buffer(writer: Writer, op: Op) -> None:
    """Write the declaration of a buffer at its address.

    Raises:
        UnsupportedError: it has several addresses, or its size is not known at compile time.
    """
    kind = op.results[0].type
    assert isinstance(kind, MemRefType)
    space, element, shape = space_of(kind), kind.get_element_type(), kind.get_shape()
    if len(op.operands) > 1:
        places = [constant_of(operand) for operand in op.operands]
        raise UnsupportedError(f"the module does not say at which of the addresses {places} the buffer {kind} is")
    if space is None or space not in SPACES.values() or not op.operands or any(size < 0 for size in shape):
        raise UnsupportedError(f"execution does not know a buffer like {op}")
    space = space.upper()
    address = writer.name(op.operands[0])
    start = constant_of(op.operands[0]) or 0
    bits = element.bitwidth if isinstance(element, FixedBitwidthType) else 64
    count = 1
    for size in shape:
        count *= size
    writer.tables.used[space] = max(writer.tables.used.get(space, 0), start + (count * bits + 7) // 8)
    number = len(writer.tables.buffers)
    writer.tables.buffers.append(f"buffer {number} ({'x'.join(map(str, [*shape, element]))} at {space} {start})")
    name = writer.declare(op.results[0])
    writer.lines.append(
        f"make_buffer(&{name}, {space}, {address}, {element_type(element)}, {number}, {len(shape)}, {writer.array(shape)});"
    )


def write_memory(writer: Writer, op: Op, name: str) -> None:
    """Write a view of memory, or an access of the scalar unit.

    Raises:
        UnsupportedError: the operation is not known.
    """
    if name in ("memref.load", "memref.store"):
        _access(writer, op, name)
        return
    if name == "memref.extract_strided_metadata":
        _metadata(writer, op)
        return
    source = writer.name(op.operands[0])
    result = op.results[0]
    if name == "memref.dim":
        writer.lines.append(f"{writer.declare(result)} = {source}.n[{writer.name(op.operands[1])}];")
        return
    if not isinstance(result.type, MemRefType):
        raise UnsupportedError(f"execution does not know {op}")
    target = writer.declare(result)
    if name in _SAME:
        writer.lines.append(f"{target} = {source};")
    elif name == "hivm.hir.bitcast":
        writer.lines.append(f"retype(&{target}, &{source}, {element_type(result.type.get_element_type())});")
    elif name == "memref.subview":
        offsets, sizes, strides = (mixed(op, what) for what in ("offsets", "sizes", "strides"))
        writer.lines.append(
            f"subview(&{target}, &{source}, {writer.array(offsets)}, {writer.array(sizes)}, {writer.array(strides)});"
        )
        kept = _kept_axes(op, sizes, result.type)
        if len(kept) != len(sizes):
            axes = ", ".join(map(str, kept))
            writer.lines.append(f"keep_axes(&{target}, &{target}, {len(kept)}, (int[]){{{axes or '0'}}});")
    elif name == "memref.reinterpret_cast":
        (offset,), sizes, strides = (mixed(op, what) for what in ("offsets", "sizes", "strides"))
        first = writer.array([offset])
        writer.lines.append(
            f"reinterpret(&{target}, &{source}, {first}[0], {len(sizes)}, {writer.array(sizes)}, {writer.array(strides)});"
        )
    elif name in ("memref.collapse_shape", "memref.expand_shape"):
        _reshape(writer, op, name, target, source)
    elif name == "memref.view":
        given = iter(op.operands[2:])
        whole = [size if size >= 0 else next(given) for size in result.type.get_shape()]
        element = element_type(result.type.get_element_type())
        writer.lines.append(
            f"view_bytes(&{target}, &{source}, {writer.name(op.operands[1])}, {element}, "
            f"{len(whole)}, {writer.array(whole)});"
        )
    else:
        raise UnsupportedError(f"execution does not know {name}")


def _reshape(writer: Writer, op: Op, name: str, target: str, source: str) -> None:
    groups = property_of(op, "reassociation")
    assert isinstance(groups, ArrayAttr)
    ends, total = [], 0
    for group in groups:
        total += len(list(group))
        ends.append(total)
    text = f"(int[]){{{', '.join(map(str, ends)) or '0'}}}"
    if name == "memref.collapse_shape":
        writer.lines.append(f"collapse(&{target}, &{source}, {len(ends)}, {text});")
        return
    static = property_of(op, "static_output_shape")
    assert isinstance(static, DenseArrayBase)
    given = iter(op.operands[1:])
    sizes = [int(size) if int(size) >= 0 else next(given) for size in static.get_values()]
    writer.lines.append(f"expand(&{target}, &{source}, {text}, {len(sizes)}, {writer.array(sizes)});")


def _metadata(writer: Writer, op: Op) -> None:
    source = writer.name(op.operands[0])
    base, offset, *rest = op.results
    rank = len(rest) // 2
    writer.lines.append(
        f"{writer.declare(base)} = {source}; {writer.name(base)}.p = {source}.base; {writer.name(base)}.rank = 0;"
    )
    writer.lines.append(f"{writer.declare(offset)} = elements_before(&{source});")
    for axis in range(rank):
        writer.lines.append(f"{writer.declare(rest[axis])} = {source}.n[{axis}];")
        writer.lines.append(f"{writer.declare(rest[rank + axis])} = {source}.s[{axis}];")


def _access(writer: Writer, op: Op, name: str) -> None:
    position = 0 if name == "memref.load" else 1
    memory, indices = op.operands[position], op.operands[position + 1 :]
    number = writer.tables.add(Instruction(name.removeprefix("memref."), "S", "nothing", (), (0, 0, 0)))
    place = f"&{writer.name(memory)}, {writer.array(list(indices))}"
    if name == "memref.load":
        kind = op.results[0].type
        writer.lines.append(f"{writer.declare(op.results[0])} = {from_bits(kind, f'load_bits(&I[{number}], {place})')};")
    else:
        writer.lines.append(
            f"store_bits(&I[{number}], {bits_of(op.operands[0].type, writer.name(op.operands[0]))}, {place});"
        )


def _kept_axes(op: Op, sizes: Sequence[int | SSAValue], kind: MemRefType) -> list[int]:
    """The axes that a subview keeps: its type may drop axes of size one."""
    wanted = list(kind.get_shape())
    ones = [axis for axis, size in enumerate(sizes) if size == 1]
    dropped = len(sizes) - len(wanted)
    if len(ones) == dropped:
        return [axis for axis in range(len(sizes)) if axis not in ones]
    strides = kind.get_strides() or [None] * len(wanted)
    source = op.operands[0].type
    assert isinstance(source, MemRefType)
    given = source.get_strides() or [None] * len(sizes)
    kept: list[int] = []
    for axis, size in enumerate(sizes):
        left = len(wanted) - len(kept)
        if left == len(sizes) - axis:
            return [*kept, *range(axis, len(sizes))]
        position = len(kept)
        if (
            left
            and size != 1
            or left
            and wanted[position] == 1
            and (strides[position] is None or strides[position] == given[axis])
        ):
            kept.append(axis)
    if len(kept) != len(wanted):
        raise UnsupportedError(f"execution does not know which axes {op} leaves out")
    return kept
