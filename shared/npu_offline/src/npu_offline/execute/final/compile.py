"""Compiles a final module to a shared object of this host."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from xdsl.dialects.builtin import ModuleOp

from ...errors import DoesNotFitError, UnsupportedError
from ...toolchain.compilation import compile_linalg
from ...toolchain.opt import parse_stage
from ..native import kept_object, shared_object_of_c
from .translate import translate

_CORES = re.compile(r'"\w*CORE_COUNT", \d+')


def parsed(final: str, soc: str, toolchain: str) -> ModuleOp:
    """A final module in generic form, with plain arithmetic for affine maps."""
    return parse_stage(final, soc, toolchain, "--lower-affine")


def executable(final: str, soc: str, toolchain: str, mutate: Callable[[ModuleOp], object] | None = None) -> bytes:
    """A shared object with the function `npu_offline_entry(slots, x, y, z)`, which runs program (x, y, z).

    Args:
        final: the module that is handed to hivmc.
        soc, toolchain: what it was compiled for, and by.
        mutate: changes the parsed module first.

    Raises:
        UnsupportedError: the module has an operation that the machine does not know, or a buffer with two addresses.
        FindingsError: the module has a buffer without an address.
        CompilationError: a compiler failed.
    """
    if mutate is None:
        # Of chips of one architecture only names and numbers of cores differ, which nothing here depends on.
        text = _CORES.sub("", final.replace(soc, ""))
        return kept_object(f"final {toolchain}\n{text}", lambda: _built(final, soc, toolchain))
    return _built(final, soc, toolchain, mutate)


def _built(final: str, soc: str, toolchain: str, mutate: Callable[[ModuleOp], object] | None = None) -> bytes:
    module = parsed(final, soc, toolchain)
    if mutate is not None:
        mutate(module)
    try:
        source = translate(module)
    except UnsupportedError as error:
        raise UnsupportedError(f"{error} ({soc}, toolchain {toolchain})") from error
    return shared_object_of_c(source)


def final_module(
    name: str, linalg: str, options: Mapping[str, object], soc: str, toolchain: str, compilation: int = 0
) -> str:
    """What the compiler makes of Linalg IR, up to hivmc; the arguments are those of `compile_linalg`.

    Raises:
        DoesNotFitError: the kernel needs more than the chip's buffers.
        CompilationError: the compiler refused it.
    """
    report = compile_linalg(name, "", linalg, options, soc, toolchain, compilation)
    if not report.fits:
        raise DoesNotFitError(f"kernel {name} does not fit {soc} (toolchain {toolchain}): {report.message}")
    return report.stages["final"]
