"""TTIR in MLIR's generic form, printed by triton-ascend's own program, which alone knows the dialect `tt`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from triton.backends.ascend.compiler import _get_triton_adapter_opt_path

from ..errors import CompilationError
from .messages import reason
from .processes import run


def generic_form(ttir: str) -> str:
    """A TTIR module as `module.mlir.parse` reads it.

    Raises:
        CompilationError: the program does not accept it.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ttir")
        path.write_text(ttir)
        done = run([_get_triton_adapter_opt_path(), "--mlir-print-op-generic", str(path)])
    if done.returncode:
        raise CompilationError(f"triton-adapter-opt failed:\n{reason(done.stderr)}")
    return done.stdout
