"""Writes out what Linalg IR leaves to the compiler's library: scans, sorts, flips, gathers, histograms and printing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from xdsl.dialects.builtin import IntegerAttr, IntegerType, ModuleOp, StringAttr, TensorType
from xdsl.ir import Operation, SSAValue
from xdsl.rewriter import InsertPoint, Rewriter

from ...errors import UnsupportedError
from ...module.mlir import name_of, parse, property_of, symbol_of
from ...toolchain.opt import opt
from .loops import HISTOGRAM, Call, dimensions, print_of, writer_of

PRINTING = {
    "npu_offline_print_text": "(i64) -> ()",
    "npu_offline_print_integer": "(i64) -> ()",
    "npu_offline_print_real": "(f64) -> ()",
    "npu_offline_print_end": "() -> ()",
}
"""Functions of the runtime that tl.device_print calls, and their types."""


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
        if not prints and writer_of(_callee(op)) is print_of:
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
    if writer_of(name) is None and "tensor<" in str(property_of(op, "function_type")):
        raise UnsupportedError(f"the emulator has no {name}")
    return writer_of(name) is not None


def _callee(op: Operation) -> str:
    return symbol_of(op, "callee") if name_of(op) == "func.call" else HISTOGRAM if name_of(op) == HISTOGRAM else ""


def _calls(module: ModuleOp, declared: dict[str, Operation]) -> Iterable[tuple[Call, Callable[[Call], str]]]:
    for op in module.walk():
        writer = writer_of(_callee(op))
        if writer is None:
            continue
        numbers = [_constant(operand) for operand in op.operands]
        scalars = [isinstance(operand.type, IntegerType) and writer is not print_of for operand in op.operands]
        places = [place for place, scalar in enumerate(scalars) if not scalar]
        constants = [number for number, scalar in zip(numbers, scalars, strict=True) if scalar and number is not None]
        if sum(scalars) != len(constants):
            raise UnsupportedError(f"the emulator has no {_callee(op)} whose axis is no constant")
        kind = op.results[0].type if op.results else None
        prefix = property_of(declared[_callee(op)], "prefix") if writer is print_of else None
        text = prefix.data if isinstance(prefix, StringAttr) else ""
        yield Call(op, places, constants, kind if isinstance(kind, TensorType) else None, text), writer


def _constant(value: SSAValue) -> int | None:
    number = property_of(value.owner, "value") if isinstance(value.owner, Operation) else None
    return number.value.data if isinstance(number, IntegerAttr) else None


def _inline(function: Operation, call: Call) -> None:
    block = function.regions[0].blocks[0]
    last = block.last_op
    assert last is not None
    results = list(last.operands)
    Rewriter.erase_op(last)
    Rewriter.inline_block(block, InsertPoint.before(call.op), call.operands)
    Rewriter.replace_op(call.op, [], new_results=results)


def _function(number: int, call: Call, body: Callable[[Call], str]) -> str:
    arguments = ", ".join(f"%a{i}: {operand.type}" for i, operand in enumerate(call.operands))
    if call.result is None:
        return f"func.func @f{number}({arguments}) {{\n{body(call)}\nreturn\n}}"
    shape = list(call.result.get_shape())
    memory = f"memref<{dimensions(shape)}{call.result.get_element_type()}>"
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
