"""Called in place of bishengir-compile with a kernel: runs the real one, then writes a "binary" for the stand-in runtime.

The binary is a line with the kernel's name, its arguments and the memory that it needs beside them, then a shared object of
this host. `libkernel.so` tells triton-ascend of that memory, as the one that hivmc writes.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from xdsl.dialects.builtin import MemRefType
from xdsl.ir import Block, BlockArgument, Operation, SSAValue

from ..errors import UnsupportedError
from ..execute.final.compile import parsed
from ..execute.final.host import host_numbers, locks, workspace_bytes
from ..execute.final.translate import translate
from ..execute.linalg.lowering import lower
from ..execute.native import shared_object, shared_object_of_c
from ..module.mlir import name_of, symbol_of
from ..toolchain.compilation import HIVMC
from ..toolchain.opt import parse_stage
from ..toolchain.processes import run

_RESERVED = "kw"  # letters of the `RESERVED` arguments: a lock and a workspace
_GRID = 6  # its size and the program's place in it, after them
_LETTERS = {"i64": "l", "f64": "d", "f32": "f"}  # of scalars; others take four bytes
_LOADS = {"memref.load", "tensor.extract"}


def main() -> None:
    """The command line of bishengir-compile."""
    soc, toolchain = os.environ["NPU_OFFLINE_CANN_SOC"], os.environ["NPU_OFFLINE_CANN_TOOLCHAIN"]
    real, arguments = os.environ["NPU_OFFLINE_CANN_COMPILER"], sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        for name in ("hivmc", "hivmc-a5"):
            (Path(folder) / name).write_text(HIVMC)
            (Path(folder) / name).chmod(0o755)
        search, final = f"{folder}{os.pathsep}{os.environ['PATH']}", Path(folder) / "final.mlir"
        done = run([real, *arguments], env={**os.environ, "PATH": search, "NPU_OFFLINE_FINAL": str(final)})
        module = final.read_text() if final.is_file() else ""
    print(done.stdout, end="")
    print(done.stderr, end="", file=sys.stderr)
    if done.returncode:
        sys.exit(done.returncode)
    binary, host = binary_of(Path(arguments[0]).read_text(), module, soc, toolchain, os.environ["NPU_OFFLINE_CANN_KERNELS"])
    target = Path(arguments[arguments.index("-o") + 1])
    for path in (target, Path(f"{target}.o")):
        path.write_bytes(binary)
    if host:
        (target.parent / "libkernel.so").write_bytes(shared_object_of_c(host))


def binary_of(linalg: str, final: str, soc: str, toolchain: str, level: str) -> tuple[bytes, str]:
    """The binary, and the C source of the functions that triton-ascend calls on the host.

    Args:
        linalg, final: the kernel's Linalg IR and its final module.
        soc, toolchain: what it was compiled for, and by.
        level: "final" or "linalg": which of the two is to run. A final module with something that only the chip has is
            replaced by the Linalg IR, and the binary says why.
    """
    module = parsed(final, soc, toolchain)
    kernel, why = b"", ""
    if level == "final":
        try:
            kernel = shared_object_of_c(translate(module))
        except UnsupportedError as error:
            why = str(error).replace("\n", " ")
    if not kernel:
        kernel = shared_object(lower(linalg, toolchain))
    numbers = host_numbers(module)
    line = f"{header(linalg, soc, toolchain)} {workspace_bytes(module)} {locks(module)} {why}\n"
    return line.encode() + kernel, "\n".join(f"long {name}(void) {{ return {number}; }}" for name, number in numbers.items())


def header(linalg: str, soc: str, toolchain: str) -> str:
    """The kernel's name, and a letter for each argument as kernels.cpp reads them."""
    module = parse_stage(linalg, soc, toolchain)
    kernel = next(op for op in module.body.block.ops if op.regions and op.regions[0].blocks)
    block = kernel.regions[0].blocks[0]
    roaming = _roaming(kernel, block)
    letters = []
    for argument in block.args[len(_RESERVED) : -_GRID]:
        if isinstance(argument.type, MemRefType):
            letters.append("a" if argument in roaming else "p")
        else:
            letters.append(_LETTERS.get(str(argument.type), "i"))
    return f"{symbol_of(kernel, 'sym_name')} {_RESERVED}{''.join(letters)}ggg"


def _roaming(kernel: Operation, block: Block) -> set[SSAValue]:
    """The pointers whose offsets are loaded from memory: they may reach any tensor of their device."""
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
