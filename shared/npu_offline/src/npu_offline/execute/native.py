"""Builds shared objects of this host: kernels, and the runtime library that they call."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path

from ..toolchain.cache import checked, private_folder, source_digest
from .c_compiler import c_compiler, host_cpu, host_triple, run_c_compiler

_PACKAGE = Path(__file__).parents[1]
_MACHINE = (
    "execute/final/accesses.c",
    "execute/final/alignment.c",
    "execute/final/axes.c",
    "execute/final/casts.c",
    "execute/final/checks.c",
    "execute/final/cube.c",
    "execute/final/findings.c",
    "execute/final/locks.c",
    "execute/final/machine.c",
    "execute/final/pipes.c",
    "execute/final/rows.c",
    "execute/final/survey.c",
    "execute/final/transfers.c",
    "execute/final/vector.c",
    "execute/final/views.c",
)
_HEADERS = (
    "execute/runtime/runtime.h",
    "execute/runtime/launch.h",
    "execute/final/generated.h",
    "execute/final/machine.h",
    "execute/final/operations.h",
    "execute/final/rows.h",
    "execute/final/survey.h",
)
_RUNTIME = (
    "execute/runtime/dma.c",
    "execute/runtime/launch.c",
    "execute/runtime/print.c",
    "execute/runtime/program.c",
    "execute/runtime/roundings.c",
    "execute/runtime/watch.c",
    *_MACHINE,
    *_HEADERS,
)
_FLAGS = ("-std=gnu11", "-fPIC", "-shared", "-pthread", "-march=native", "-fwrapv", "-fno-strict-aliasing")
_EXACT = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")  # faster, with the same results
_SOURCES = (  # the code that decides what is in a shared object
    "execute/backend.py",
    "execute/c_compiler.py",
    "execute/final/compile.py",
    "execute/final/data_dependence.py",
    "execute/final/flags.py",
    "execute/final/function.py",
    "execute/final/host.py",
    "execute/final/instructions.py",
    "execute/final/memory.py",
    "execute/final/scalars.py",
    "execute/final/state.py",
    "execute/final/translate.py",
    "execute/final/writer.py",
    "execute/linalg/casts.py",
    "execute/linalg/instrument.py",
    "execute/linalg/library.py",
    "execute/linalg/loops.py",
    "execute/linalg/lowering.py",
    "execute/linalg/memory.py",
    "execute/linalg/products.py",
    "execute/linalg/sums.py",
    "execute/native.py",
    "module/arithmetic.py",
    "module/jumps.py",
    "module/mlir.py",
    "module/reader.py",
    "module/operations.py",
    "module/plan.py",
    "module/shapes.py",
    "toolchain/cache.py",
    "toolchain/compilation.py",
    "toolchain/compilers.py",
    "toolchain/frontend.py",
    "toolchain/helpers.py",
    "toolchain/messages.py",
    "toolchain/opt.py",
    *_HEADERS,
)


def native_key() -> str:
    """What a shared object depends on beside the kernel: this package's code, the C compiler and the processor."""
    return f"{source_digest(*_SOURCES)}-{' '.join(c_compiler())}-{platform.machine()}-{host_cpu()}"


def shared_object(llvm_dialect: str) -> bytes:
    """A shared object from a module in MLIR's LLVM dialect, optimised without changing floating-point results."""
    from triton._C.libtriton import ir, llvm

    triple = host_triple()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "kernel.mlir").write_text(llvm_dialect)
        context = ir.context()
        ir.load_dialects(context)
        llvm.init_targets()
        module = llvm.to_module(ir.parse_mlir_module(str(folder / "kernel.mlir"), context), llvm.context())
        llvm.attach_datalayout(module, triple, host_cpu(), "")
        llvm.optimize_module(module, llvm.OPTIMIZE_O1, host_cpu(), "", [], False)
        (folder / "kernel.o").write_bytes(llvm.translate_to_asm(str(module), triple, host_cpu(), "", [], False, True))
        run_c_compiler("-shared", "-o", folder / "kernel.so", folder / "kernel.o", "-lm")
        return (folder / "kernel.so").read_bytes()


def shared_object_of_c(source: str) -> bytes:
    """A shared object from C that includes machine.h."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "kernel.c").write_text(source)
        run_c_compiler(
            *_FLAGS,
            *_EXACT,
            "-O0",
            "-w",
            f"-I{Path(__file__).parent / 'final'}",
            "-o",
            folder / "kernel.so",
            folder / "kernel.c",
            "-lm",
        )
        return (folder / "kernel.so").read_bytes()


def kept_object(what: str, build: Callable[[], bytes]) -> bytes:
    """A shared object from the cache; `build` makes it where there is none for this text and this code."""
    key = hashlib.sha256(f"{native_key()}\n{what}".encode()).hexdigest()
    return checked(private_folder("objects") / f"{key}.so", build)


def runtime_path() -> Path:
    """The path of the runtime library, which is built once for each version of its source."""
    key = hashlib.sha256(f"{source_digest(*_RUNTIME)}{native_key()}".encode()).hexdigest()[:32]
    path = private_folder("runtime") / f"npu_offline_{key}.so"
    checked(path, _build_runtime)
    return path


@functools.cache
def runtime() -> ctypes.CDLL:
    """The runtime library; kernels that are loaded later find its functions by name.

    A process has one: kernels would call the functions of the first, whichever of several launched them.
    """
    loaded_before = ctypes.CDLL(None)
    if hasattr(loaded_before, "npu_offline_launch"):
        return loaded_before
    return ctypes.CDLL(str(runtime_path()), mode=ctypes.RTLD_GLOBAL)


def _build_runtime() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "runtime.so"
        sources = [_PACKAGE / name for name in _RUNTIME if name.endswith(".c")]
        run_c_compiler(*_FLAGS, *_EXACT, "-O3", "-o", built, *sources, "-lm")
        return built.read_bytes()
