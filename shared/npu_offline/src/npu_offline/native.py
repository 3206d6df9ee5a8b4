"""From LLVM to a shared object of this host, and the runtime library beside it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from .cache import cache_dir, source_digest, write_atomically
from .errors import CompilationError, ToolchainMissingError

_RUNTIME = ("runtime.c", "watch.c", "runtime.h")
_SOURCES = (  # of what a shared object is made by
    "backend.py",
    "cache.py",
    "frontend.py",
    "instrument.py",
    "lowering.py",
    "mlir.py",
    "native.py",
)
_LEVELS = {  # x86-64 levels, best first, by one feature that tells each
    "x86-64-v4": "avx512vl",
    "x86-64-v3": "avx2",
}


def c_compiler() -> list[str]:
    """The C compiler's command line: the environment variable CC, else cc, gcc or clang.

    Raises:
        ToolchainMissingError: there is none.
    """
    for candidate in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        words = shlex.split(candidate)
        if words and shutil.which(words[0]):
            return words
    raise ToolchainMissingError("emulation needs a C compiler (cc, gcc or clang): install one, or name it in CC")


def missing_c_compiler() -> str | None:
    """Why nothing can be compiled for this host, None if it can."""
    try:
        c_compiler()
    except ToolchainMissingError as error:
        return str(error)
    return None


@functools.cache
def host_cpu() -> str:
    """What LLVM may assume of this host's processor."""
    if platform.machine() != "x86_64":
        return "generic"
    try:
        flags = Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split()
    except OSError:
        flags = []
    return next((level for level, flag in _LEVELS.items() if flag in flags), "x86-64")


def host_triple() -> str:
    """LLVM's name for this host."""
    return f"{platform.machine()}-unknown-linux-gnu"


def native_key() -> str:
    """What a shared object depends on beside the kernel: the code that makes it, the C compiler and the processor."""
    return f"{source_digest(*_SOURCES)}-{' '.join(c_compiler())}-{platform.machine()}-{host_cpu()}"


@functools.cache
def has_c_function(name: str) -> bool:
    """True if the C mathematics library has a function of that name."""
    return hasattr(ctypes.CDLL("libm.so.6"), name)


def shared_object(llvm_dialect: str) -> bytes:
    """A shared object from a module in MLIR's LLVM dialect, optimised without touching floating-point semantics."""
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
        llvm.optimize_module(module, llvm.OPTIMIZE_O3, host_cpu(), "", [], False)
        (folder / "kernel.o").write_bytes(llvm.translate_to_asm(str(module), triple, host_cpu(), "", [], False, True))
        _cc("-shared", "-o", folder / "kernel.so", folder / "kernel.o", "-lm")
        return (folder / "kernel.so").read_bytes()


@functools.cache
def runtime() -> ctypes.CDLL:
    """The runtime library, built once per version of its source; its symbols are visible to kernels loaded later."""
    key = hashlib.sha256(f"{source_digest(*_RUNTIME)}{native_key()}".encode()).hexdigest()[:32]
    path = cache_dir() / "runtime" / f"npu_offline_{key}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory() as folder:
            built = Path(folder) / "runtime.so"
            sources = [Path(__file__).with_name(name) for name in _RUNTIME if name.endswith(".c")]
            _cc("-std=gnu11", "-O2", "-fPIC", "-shared", "-pthread", "-o", built, *sources)
            write_atomically(path, built.read_bytes())
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def load(binary: bytes) -> ctypes.CDLL:
    """The shared object in memory."""
    runtime()
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(binary)
        file.flush()
        return ctypes.CDLL(file.name)


def _cc(*arguments: str | Path) -> None:
    done = subprocess.run([*c_compiler(), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise CompilationError(f"{c_compiler()[0]} failed:\n{done.stderr[-3000:]}")
