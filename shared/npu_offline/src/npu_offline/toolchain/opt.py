"""The toolchain's `bishengir-opt`: it runs passes, and translates MLIR to the generic form that `module.mlir` reads."""

from __future__ import annotations

from pathlib import Path

from xdsl.dialects.builtin import ModuleOp

from ..errors import CompilationError
from ..module.mlir import parse
from .compilers import printer
from .messages import reason
from .processes import run


def opt(program: Path, text: str, *options: str) -> str:
    """What `bishengir-opt` makes of an MLIR module: the options are passes, `--mlir-print-op-generic` and the like."""
    command = [str(program), "--allow-unregistered-dialect", *options, "-"]
    done = run(command, input=text)
    if done.returncode:
        raise CompilationError(f"{program.name} failed:\n{reason(done.stderr)}")
    return done.stdout


def parse_stage(text: str, soc: str, toolchain: str, *passes: str) -> ModuleOp:
    """A stage of a compilation for a chip, its Linalg IR or its final module, parsed.

    Args:
        text: the stage, as `Report.stages` has it.
        soc, toolchain: what it was compiled for, and by which version.
        passes: options of `bishengir-opt` to run first, such as "--lower-affine".

    Raises:
        CompilationError: `bishengir-opt` does not accept it.
    """
    return parse(opt(printer(soc, toolchain), text, *passes, "--mlir-print-op-generic"))
