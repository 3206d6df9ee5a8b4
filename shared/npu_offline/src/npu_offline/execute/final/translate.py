"""Translates a final module to C: scalar code becomes C, instructions become rows of a table, issued in program order.

The compiler has already assigned addresses to buffers and placed flags between pipes; the translation keeps both.
"""

from __future__ import annotations

import re

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation as Op

from ...errors import Finding, FindingsError, UnsupportedError
from ...module.mlir import name_of, symbol_of
from ...module.plan import read_spec
from ..loading import BUFFERS, INSTRUCTIONS, LOCKS, WORKSPACE
from .data_dependence import is_data_dependent
from .function import Function
from .host import locks, workspace_bytes
from .writer import Tables

_SIZES = {"UB": "UB_SIZE", "L1": "L1_SIZE", "L0A": "L0A_SIZE", "L0B": "L0B_SIZE", "L0C": "L0C_SIZE"}


def translate(module: ModuleOp) -> str:
    """The C source of a shared object with the function `npu_offline_entry(slots, x, y, z)`, as `lowering.lower` makes it.

    Args:
        module: a final module without affine operations, parsed.

    Raises:
        UnsupportedError: it has an operation that the machine does not know.
        FindingsError: it has a buffer without an address.
    """
    functions = [op for op in module.walk() if name_of(op) == "func.func" and op.regions[0].blocks]
    devices = {_core_of(op): op for op in functions if "DEVICE" in str(op.attributes.get("hacc.function_kind"))}
    bodies = {symbol_of(op, "sym_name"): op for op in functions}
    if not devices or not devices.keys() <= {"AIC", "AIV"}:
        raise UnsupportedError(f"execution does not know a kernel for {', '.join(devices) or 'no core'}")
    name = symbol_of(next(iter(devices.values())), "sym_name")
    unplaced = [_without_address(op) for device in devices.values() for op in device.walk() if name_of(op) == "memref.alloc"]
    if unplaced:
        raise FindingsError(name, unplaced)
    tables = Tables(bodies)
    parts = [Function(tables, core).write(op) for core, op in sorted(devices.items())]
    spec = read_spec(module)
    sizes = ", ".join(f"[{space}] = {spec[name] // 8}" for space, name in _SIZES.items())
    used = ", ".join(f"[{space}] = {end}" for space, end in tables.used.items())
    buffers = ",\n".join(f'  {{"{text}"}}' for text in tables.buffers)
    rows = ",\n".join(f"  {row.row(number)}" for number, row in enumerate(tables.instructions))
    names = " ".join(row.name for row in tables.instructions)
    return "\n".join(
        [
            '#include "machine.h"\n#include "operations.h"\n#include "generated.h"',
            f"static const buffer_name buffers[] = {{\n{buffers or '  {0}'}}};",
            f"static const instruction I[] = {{\n{rows or '  {0}'}}};",
            *parts,
            f'static const module M_ = {{"{name}", I, buffers, {workspace_bytes(module)}, {{{sizes}}}, {{{used or "0"}}},',
            f"  {int(any(is_data_dependent(op) for op in devices.values()))},",
            f"  {'AIC' if 'AIC' in devices else 'NULL'}, {'AIV' if 'AIV' in devices else 'NULL'}}};",
            "void npu_offline_entry(const int64_t *slots, int32_t x, int32_t y, int32_t z)",
            "{ execute(&M_, slots, x, y, z); }",
            f"const int64_t {WORKSPACE} = {workspace_bytes(module)};",
            f"const int64_t {LOCKS} = {locks(module)};",
            f'const char {INSTRUCTIONS}[] = "{names}";',
            f'const char {BUFFERS}[] = "{";".join(tables.buffers)}";',
        ]
    )


def _without_address(buffer: Op) -> Finding:
    return Finding(
        "plan", None, f"the compiler gave no address to the buffer {buffer.results[0].type}: what it holds is lost"
    )


def _core_of(function: Op) -> str:
    found = re.search(r"<(\w+)>", str(function.attributes.get("hivm.func_core_type")))
    return found[1] if found else ""
