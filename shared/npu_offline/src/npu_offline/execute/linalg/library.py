"""Writes out what Linalg IR leaves to the compiler's library: scans, sorts, flips, gathers, histograms and printing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from xdsl.dialects.builtin import IntegerAttr, IntegerType, ModuleOp, StringAttr, TensorType
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.rewriter import InsertPoint, Rewriter

from ...errors import UnsupportedError
from ...module.mlir import name_of, parse, property_of, symbol_of
from ...toolchain.opt import opt

PRINTING = {
    "npu_offline_print_text": "(i64) -> ()",
    "npu_offline_print_integer": "(i64) -> ()",
    "npu_offline_print_real": "(f64) -> ()",
    "npu_offline_print_end": "() -> ()",
}
"""Functions of the runtime that tl.device_print calls, and their types."""
_TEXT_BYTES = 8
_OUT_OF_RANGE = {1: 1, 8: 0x5A, 16: 0x5A5A, 32: 0x5A5A5A5A, 64: 0x5A5A5A5A5A5A5A5A}  # an integer that a gather does not find
_HISTOGRAM = "hfusion.histogram"


@dataclass(frozen=True)
class _Call:
    """A call of the library.

    Attributes:
        op: the operation.
        operands: those that are no constants.
        constants: values of the others, in order.
        result: the type that it returns, None where it prints.
        prefix: the text that it prints.
    """

    op: Operation
    operands: Sequence[SSAValue]
    constants: Sequence[int]
    result: TensorType[Attribute] | None
    prefix: str = ""


def write_out(module: ModuleOp, program: Path, *, prints: bool) -> None:
    """Replace calls of the library by loops.

    Args:
        module: Linalg IR.
        program: the toolchain's `bishengir-opt`, which reads the loops.
        prints: whether calls that print do so; otherwise they are removed.

    Raises:
        UnsupportedError: the emulator does not know the function.
    """
    declared = {symbol_of(op, "sym_name"): op for op in module.body.block.ops if _is_of_library(op)}
    found = [(call, body) for call, body in _calls(module, declared) if prints or call.result is not None]
    for op in list(module.walk()):
        if not prints and _writer_of(_callee(op)) is _print:
            Rewriter.erase_op(op)
    for declaration in declared.values():
        Rewriter.erase_op(declaration, safe_erase=False)
    if not found:
        return
    functions = "\n".join(_function(number, call, body) for number, (call, body) in enumerate(found))
    declarations = [f"func.func private @{name}{kind}" for name, kind in PRINTING.items() if name in functions]
    written = parse(opt(program, "\n".join([*declarations, functions]), "--mlir-print-op-generic"))
    bodies = {symbol_of(op, "sym_name"): op for op in written.body.block.ops}
    for number, (call, _) in enumerate(found):
        _inline(bodies[f"f{number}"], call)
    for name in PRINTING:
        if name in bodies:
            bodies[name].detach()
            Rewriter.insert_op(bodies[name], InsertPoint.at_end(module.body.block))


def _is_of_library(op: Operation) -> bool:
    if name_of(op) != "func.func" or op.regions[0].blocks:
        return False
    name = symbol_of(op, "sym_name")
    if _writer_of(name) is None and "tensor<" in str(property_of(op, "function_type")):
        raise UnsupportedError(f"the emulator has no {name}")
    return _writer_of(name) is not None


def _callee(op: Operation) -> str:
    return symbol_of(op, "callee") if name_of(op) == "func.call" else _HISTOGRAM if name_of(op) == _HISTOGRAM else ""


def _calls(module: ModuleOp, declared: dict[str, Operation]) -> Iterable[tuple[_Call, Callable[[_Call], str]]]:
    for op in module.walk():
        writer = _writer_of(_callee(op))
        if writer is None:
            continue
        numbers = [_constant(operand) for operand in op.operands]
        scalars = [isinstance(operand.type, IntegerType) and writer is not _print for operand in op.operands]
        operands = [operand for operand, scalar in zip(op.operands, scalars, strict=True) if not scalar]
        constants = [number for number, scalar in zip(numbers, scalars, strict=True) if scalar and number is not None]
        if sum(scalars) != len(constants):
            raise UnsupportedError(f"the emulator has no {_callee(op)} whose axis is no constant")
        kind = op.results[0].type if op.results else None
        prefix = property_of(declared[_callee(op)], "prefix") if writer is _print else None
        text = prefix.data if isinstance(prefix, StringAttr) else ""
        yield _Call(op, operands, constants, kind if isinstance(kind, TensorType) else None, text), writer


def _constant(value: SSAValue) -> int | None:
    number = property_of(value.owner, "value") if isinstance(value.owner, Operation) else None
    return number.value.data if isinstance(number, IntegerAttr) else None


def _inline(function: Operation, call: _Call) -> None:
    block = function.regions[0].blocks[0]
    last = block.last_op
    assert last is not None
    results = list(last.operands)
    Rewriter.erase_op(last)
    Rewriter.inline_block(block, InsertPoint.before(call.op), call.operands)
    Rewriter.replace_op(call.op, [], new_results=results)


def _function(number: int, call: _Call, body: Callable[[_Call], str]) -> str:
    arguments = ", ".join(f"%a{i}: {operand.type}" for i, operand in enumerate(call.operands))
    if call.result is None:
        return f"func.func @f{number}({arguments}) {{\n{body(call)}\nreturn\n}}"
    shape = list(call.result.get_shape())
    memory = f"memref<{_dimensions(shape)}{call.result.get_element_type()}>"
    lines = [
        f"func.func @f{number}({arguments}) -> {call.result} {{",
        "%zero = arith.constant 0 : index",
        "%one = arith.constant 1 : index",
        f"%to = memref.alloc() : {memory}",
        body(call).replace("MEMORY", memory),
        f"%result = bufferization.to_tensor %to restrict writable : {memory}",
        f"return %result : {call.result}\n}}",
    ]
    return "\n".join(lines)


def _dimensions(shape: Sequence[int]) -> str:
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


def _scan(call: _Call, function: str, neutral: int) -> str:
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


def _flip(call: _Call) -> str:
    shape, kind, _ = _tensor(call.operands[0])
    axis = call.constants[0]
    lines = f"""
        %last = arith.constant {shape[axis] - 1} : index
        %k = arith.subi %last, %i{axis} : index
        %x = tensor.extract %a0[{_at(shape, axis, "%k")}] : {kind}
        memref.store %x, %to[{_at(shape)}] : MEMORY"""
    return _loops(shape, lines)


def _gather(call: _Call) -> str:
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


def _sort(call: _Call) -> str:
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


def _histogram(call: _Call) -> str:
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


def _print(call: _Call) -> str:
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


_WRITERS: dict[str, Callable[[_Call], str]] = {
    "triton_cumsum": lambda call: _scan(call, "add", 0),
    "triton_cumprod": lambda call: _scan(call, "mul", 1),
    "triton_flip": _flip,
    "triton_gather": _gather,
    "triton_sort": _sort,
    "triton_print": _print,
    _HISTOGRAM: _histogram,
}


def _writer_of(name: str) -> Callable[[_Call], str] | None:
    return _WRITERS.get(re.sub(r"_\d+$", "", name)) if name else None
