"""Stands before the real bishengir-compile: that compiles, and what it says is said; then a "binary" is written for the
stand-in runtime: the same Linalg IR, lowered for this host, behind a line that names the kernel and its arguments.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from xdsl.dialects.builtin import MemRefType
from xdsl.ir import Block, BlockArgument, Operation, SSAValue

from ..compilation import HIVMC
from ..lowering import lower
from ..mlir import name_of, opt, parse, symbol_of
from ..native import shared_object
from ..processes import run
from ..toolchains import tool

_RESERVED = 2  # a lock and a workspace, before the kernel's own arguments
_GRID = 6  # its size and the program's place in it, after them
_LETTERS = {"i64": "l", "f64": "d", "f32": "f"}  # of scalars; others take four bytes
_LOADS = {"memref.load", "tensor.extract"}


def main() -> None:
    """The command line of bishengir-compile."""
    toolchain = os.environ["NPU_OFFLINE_CANN_TOOLCHAIN"]
    real, arguments = str(tool(toolchain, "bishengir-compile")), sys.argv[1:]
    if any(word in ("--help", "--version") for word in arguments):
        os.execv(real, [real, *arguments])
    with tempfile.TemporaryDirectory() as folder:
        for name in ("hivmc", "hivmc-a5"):
            (Path(folder) / name).write_text(HIVMC)
            (Path(folder) / name).chmod(0o755)
        search = f"{folder}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": search, "NPU_OFFLINE_FINAL": f"{folder}/final.mlir"}
        done = run([real, *arguments], env=environment)
    print(done.stdout, end="")
    print(done.stderr, end="", file=sys.stderr)
    if done.returncode:
        sys.exit(done.returncode)
    linalg = Path(arguments[0]).read_text()
    binary = header(linalg, toolchain).encode() + b"\n" + shared_object(lower(linalg, toolchain))
    target = Path(arguments[arguments.index("-o") + 1])
    for path in (target, Path(f"{target}.o")):
        path.write_bytes(binary)


def header(linalg: str, toolchain: str) -> str:
    """The kernel's name, and a letter for each argument as kernels.cpp reads them."""
    module = parse(opt(tool(toolchain, "bishengir-opt"), linalg, "--mlir-print-op-generic"))
    kernel = next(op for op in module.body.block.ops if op.regions and op.regions[0].blocks)
    block = kernel.regions[0].blocks[0]
    roaming = _roaming(kernel, block)
    letters = []
    for argument in block.args[_RESERVED:-_GRID]:
        if isinstance(argument.type, MemRefType):
            letters.append("a" if argument in roaming else "p")
        else:
            letters.append(_LETTERS.get(str(argument.type), "i"))
    return f"{symbol_of(kernel, 'sym_name')} {'r' * _RESERVED}{''.join(letters)}ggg"


def _roaming(kernel: Operation, block: Block) -> set[SSAValue]:
    """The pointers whose offsets come from memory: they may reach any tensor of their device."""
    found: set[SSAValue] = set()
    for op in kernel.walk():
        if name_of(op) != "memref.reinterpret_cast" or op.operands[0] not in block.args:
            continue
        if any(name_of(source) in _LOADS for source in _sources(op.operands[1:])):
            found.add(op.operands[0])
    return found


def _sources(values: Sequence[SSAValue]) -> set[Operation]:
    """All operations that values are computed by."""
    found: set[Operation] = set()
    pending = list(values)
    seen: set[SSAValue] = set()
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        owner = value.owner
        if isinstance(value, BlockArgument):
            parent = value.block.parent_op()
            if parent is not None:  # what a loop carries
                pending += parent.operands
                pending += [o for region in parent.regions for b in region.blocks if b.last_op for o in b.last_op.operands]
        elif isinstance(owner, Operation) and owner not in found:
            found.add(owner)
            pending += owner.operands
            pending += [o for region in owner.regions for b in region.blocks if b.last_op for o in b.last_op.operands]
    return found
