"""The library's functions as loops in MLIR: the body of each, in which `MEMORY` stands for the result's type."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xdsl.dialects.builtin import TensorType
from xdsl.ir import Attribute, Operation, SSAValue

_TEXT_BYTES = 8
_OUT_OF_RANGE = {1: 1, 8: 0x5A, 16: 0x5A5A, 32: 0x5A5A5A5A, 64: 0x5A5A5A5A5A5A5A5A}  # an integer that a gather does not find
HISTOGRAM = "hfusion.histogram"


@dataclass(frozen=True)
class Call:
    """A call of the library.

    Attributes:
        op: the operation.
        places: of the operands that are no constants.
        constants: values of the others, in order.
        result: the type that it returns, None where it prints.
        prefix: the text that it prints.
    """

    op: Operation
    places: Sequence[int]
    constants: Sequence[int]
    result: TensorType[Attribute] | None
    prefix: str = ""

    @property
    def operands(self) -> list[SSAValue]:
        """Those that are no constants; another call's result changes when that call is written out."""
        return [self.op.operands[place] for place in self.places]


def dimensions(shape: Sequence[int]) -> str:
    return "".join(f"{size}x" for size in shape)


def _loops(shape: Sequence[int], body: str, skip: int = -1) -> str:
    """Loops over all axes but one, whose index is the body's."""
    opened = [
        f"%n{axis} = arith.constant {size} : index\nscf.for %i{axis} = %zero to %n{axis} step %one {{"
        for axis, size in enumerate(shape)
        if axis != skip
    ]
    return "\n".join([*opened, body, "}" * len(opened)])


def _at(shape: Sequence[int], axis: int = -1, index: str = "") -> str:
    """An index of an element; along the axis it is another one."""
    return ", ".join(index if i == axis else f"%i{i}" for i in range(len(shape)))


def _tensor(value: SSAValue) -> tuple[list[int], str, str]:
    """Shape, type and type of the elements of a tensor."""
    assert isinstance(value.type, TensorType)
    return list(value.type.get_shape()), str(value.type), str(value.type.get_element_type())


def _scan(call: Call, function: str, neutral: int) -> str:
    shape, kind, element = _tensor(call.operands[0])
    axis, reverse = call.constants
    floats = not element.startswith("i")
    index = f"%last = arith.constant {shape[axis] - 1} : index\n"
    index += "%k = arith.subi %last, %step : index" if reverse else "%k = arith.addi %zero, %step : index"
    at = _at(shape, axis, "%k")
    lines = f"""
        %first = arith.constant {f"{neutral}.0" if floats else neutral} : {element}
        %n{axis} = arith.constant {shape[axis]} : index
        %end = scf.for %step = %zero to %n{axis} step %one iter_args(%sum = %first) -> ({element}) {{
        {index}
        %x = tensor.extract %a0[{at}] : {kind}
        %next = arith.{function}{"f" if floats else "i"} %sum, %x : {element}
        memref.store %next, %to[{at}] : MEMORY
        scf.yield %next : {element}
        }}"""
    return _loops(shape, lines, axis)


def _flip(call: Call) -> str:
    shape, kind, _ = _tensor(call.operands[0])
    axis = call.constants[0]
    lines = f"""
        %last = arith.constant {shape[axis] - 1} : index
        %k = arith.subi %last, %i{axis} : index
        %x = tensor.extract %a0[{_at(shape, axis, "%k")}] : {kind}
        memref.store %x, %to[{_at(shape)}] : MEMORY"""
    return _loops(shape, lines)


def _gather(call: Call) -> str:
    source, kind, element = _tensor(call.operands[0])
    shape, index_kind, index_element = _tensor(call.operands[1])
    axis = call.constants[0]
    bits = int(re.sub(r"\D", "", element))
    missing = f"{_OUT_OF_RANGE[bits]}" if element.startswith("i") else "0x" + {16: "7E00", 32: "7FC00000"}.get(bits, "")
    if element == "bf16":
        missing = "0x7FC0"
    lines = f"""
        %size = arith.constant {source[axis]} : index
        %missing = arith.constant {missing} : {element}
        %number = tensor.extract %a1[{_at(shape)}] : {index_kind}
        %k = arith.index_cast %number : {index_element} to index
        %inside = arith.cmpi ult, %k, %size : index
        %safe = arith.select %inside, %k, %zero : index
        %x = tensor.extract %a0[{_at(shape, axis, "%safe")}] : {kind}
        %y = arith.select %inside, %x, %missing : {element}
        memref.store %y, %to[{_at(shape)}] : MEMORY"""
    return _loops(shape, lines)


def _sort(call: Call) -> str:
    shape, kind, element = _tensor(call.operands[0])
    axis, descending = call.constants
    less = ("ogt" if descending else "olt") if not element.startswith("i") else "sgt" if descending else "slt"
    compare = f"arith.cmp{'i' if element.startswith('i') else 'f'} {less}"
    here, before = (_at(shape, axis, name) for name in ("%k", "%b"))
    lines = f"""
        %n{axis} = arith.constant {shape[axis]} : index
        scf.for %step = %zero to %n{axis} step %one {{
        %x = tensor.extract %a0[{_at(shape, axis, "%step")}] : {kind}
        %place = scf.while (%k = %step) : (index) -> index {{
        %positive = arith.cmpi sgt, %k, %zero : index
        %down = arith.subi %k, %one : index
        %b = arith.maxsi %down, %zero : index
        %y = memref.load %to[{before}] : MEMORY
        %smaller = {compare}, %x, %y : {element}
        %moves = arith.andi %positive, %smaller : i1
        scf.condition(%moves) %k : index
        }} do {{
        ^bb0(%k: index):
        %b = arith.subi %k, %one : index
        %y = memref.load %to[{before}] : MEMORY
        memref.store %y, %to[{here}] : MEMORY
        scf.yield %b : index
        }}
        memref.store %x, %to[{_at(shape, axis, "%place")}] : MEMORY
        }}"""
    return _loops(shape, lines, axis)


def _histogram(call: Call) -> str:
    shape, kind, element = _tensor(call.operands[0])
    assert call.result is not None
    result = str(call.result.get_element_type())
    bins = call.result.get_shape()[0]
    lines = f"""
        %number = tensor.extract %a0[{_at(shape)}] : {kind}
        %k = arith.index_cast %number : {element} to index
        %inside = arith.cmpi ult, %k, %bins : index
        %safe = arith.select %inside, %k, %zero : index
        %more = arith.extui %inside : i1 to {result}
        %count = memref.load %to[%safe] : MEMORY
        %sum = arith.addi %count, %more : {result}
        memref.store %sum, %to[%safe] : MEMORY"""
    cleared = f"""
        %bins = arith.constant {bins} : index
        %nothing = arith.constant 0 : {result}
        scf.for %bin = %zero to %bins step %one {{
        memref.store %nothing, %to[%bin] : MEMORY
        }}"""
    return f"{cleared}\n{_loops(shape, lines)}"


def print_of(call: Call) -> str:
    lines = ["%zero = arith.constant 0 : index", "%one = arith.constant 1 : index"]
    text = call.prefix.encode()
    for first in range(0, len(text), _TEXT_BYTES):
        number = int.from_bytes(text[first : first + _TEXT_BYTES].ljust(_TEXT_BYTES, b"\0"), "little", signed=True)
        lines.append(f"%t{first} = arith.constant {number} : i64")
        lines.append(f"call @npu_offline_print_text(%t{first}) : (i64) -> ()")
    for position, operand in enumerate(call.operands):
        if isinstance(operand.type, TensorType):
            shape, kind, element = _tensor(operand)
            read = f"%x{position} = tensor.extract %a{position}[{_at(shape)}] : {kind}\n"
            lines.append(_loops(shape, read + _printed(f"%x{position}", element)))
        else:
            lines.append(_printed(f"%a{position}", str(operand.type)))
    return "\n".join([*lines, "call @npu_offline_print_end() : () -> ()"])


def _printed(value: str, element: str) -> str:
    wide = "f64" if element.endswith(("f16", "f32", "f64")) else "i64"
    cast = "" if element == wide else f"{value}w = arith.ext{'f' if wide == 'f64' else 'si'} {value} : {element} to {wide}\n"
    name = "real" if wide == "f64" else "integer"
    return f"{cast}func.call @npu_offline_print_{name}({value}{'w' if cast else ''}) : ({wide}) -> ()"


_WRITERS: dict[str, Callable[[Call], str]] = {
    "triton_cumsum": lambda call: _scan(call, "add", 0),
    "triton_cumprod": lambda call: _scan(call, "mul", 1),
    "triton_flip": _flip,
    "triton_gather": _gather,
    "triton_sort": _sort,
    "triton_print": print_of,
    HISTOGRAM: _histogram,
}


def writer_of(name: str) -> Callable[[Call], str] | None:
    """The function that writes a call of a library function out; None for any other name."""
    return _WRITERS.get(re.sub(r"_\d+$", "", name)) if name else None
