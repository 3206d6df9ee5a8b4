"""The host functions of a final module: they return how much memory a launch needs beside its arguments."""

from __future__ import annotations

import re

from xdsl.dialects.builtin import IntegerAttr, ModuleOp
from xdsl.ir import Operation as Op

from ...errors import UnsupportedError
from ...module.mlir import name_of, property_of, symbol_of

WORKSPACE, LOCKS = "infer_workspace_shape_function", "infer_sync_block_lock_num_function"


def host_numbers(module: ModuleOp) -> dict[str, int]:
    """What each host function returns, by its name: the kernel's name, `_`, and what it returns.

    Raises:
        UnsupportedError: it is no constant.
    """
    found = {}
    for op in module.walk():
        if name_of(op) != "func.func" or "hacc.host_func_type" not in op.attributes:
            continue
        last = op.regions[0].blocks[0].last_op
        value = None
        if last is not None and last.operands and isinstance(last.operands[0].owner, Op):
            value = property_of(last.operands[0].owner, "value")
        if not isinstance(value, IntegerAttr):
            raise UnsupportedError(f"what {symbol_of(op, 'sym_name')} returns is no constant")
        found[symbol_of(op, "sym_name")] = value.value.data
    return found


def workspace_bytes(module: ModuleOp) -> int:
    """The bytes of workspace in global memory for each program."""
    return _told(host_numbers(module), WORKSPACE)


def locks(module: ModuleOp) -> int:
    """The number of locks of eight bytes that the programs of a launch take turns by."""
    return _told(host_numbers(module), LOCKS)


def _told(numbers: dict[str, int], what: str) -> int:
    return next((number for name, number in numbers.items() if re.fullmatch(rf"\w+_{what}", name)), 0)
