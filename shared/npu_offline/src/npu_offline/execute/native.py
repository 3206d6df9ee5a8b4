"""Builds and loads shared objects of this host: kernels, and the runtime library that they call."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import CompilationError, ToolchainMissingError
from ..toolchain.cache import checked, private_folder, source_digest
from ..toolchain.messages import reason
from ..toolchain.processes import run

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
# Symbols of a final module's shared object: bytes of workspace for each program, locks, names of instructions and buffers.
WORKSPACE, LOCKS = "npu_offline_workspace", "npu_offline_locks"
INSTRUCTIONS, BUFFERS = "npu_offline_instructions", "npu_offline_buffers"
_RUNTIME = (
    "execute/runtime/dma.c",
    "execute/runtime/launch.c",
    "execute/runtime/print.c",
    "execute/runtime/program.c",
    "execute/runtime/watch.c",
    *_MACHINE,
    *_HEADERS,
)
_FLAGS = ("-std=gnu11", "-fPIC", "-shared", "-pthread", "-march=native", "-fwrapv", "-fno-strict-aliasing")
_EXACT = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")  # faster, with the same results
_SOURCES = (  # the code that decides what is in a shared object
    "execute/backend.py",
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
    "execute/linalg/instrument.py",
    "execute/linalg/library.py",
    "execute/linalg/lowering.py",
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
_LEVELS = {  # x86-64 levels, highest first, each with a feature that implies it
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
    """Why there is no C compiler, None if there is one."""
    try:
        c_compiler()
    except ToolchainMissingError as error:
        return str(error)
    return None


@functools.cache
def host_cpu() -> str:
    """The processor that LLVM compiles for."""
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
    """What a shared object depends on beside the kernel: this package's code, the C compiler and the processor."""
    return f"{source_digest(*_SOURCES)}-{' '.join(c_compiler())}-{platform.machine()}-{host_cpu()}"


@functools.cache
def has_c_function(name: str) -> bool:
    """True if the C mathematics library has a function of that name."""
    return hasattr(ctypes.CDLL("libm.so.6"), name)


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
        llvm.optimize_module(module, llvm.OPTIMIZE_O3, host_cpu(), "", [], False)
        (folder / "kernel.o").write_bytes(llvm.translate_to_asm(str(module), triple, host_cpu(), "", [], False, True))
        _cc("-shared", "-o", folder / "kernel.so", folder / "kernel.o", "-lm")
        return (folder / "kernel.so").read_bytes()


def shared_object_of_c(source: str) -> bytes:
    """A shared object from C that includes machine.h."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "kernel.c").write_text(source)
        _cc(
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
        _cc(*_FLAGS, *_EXACT, "-O3", "-o", built, *sources, "-lm")
        return built.read_bytes()


@dataclass(frozen=True)
class Binary:
    """A kernel's shared object and, where results are to be compared, that of its Linalg IR."""

    main: bytes
    beside: bytes = b""

    def packed(self) -> bytes:
        """One string of bytes, as Triton keeps it."""
        return len(self.main).to_bytes(8, "little") + self.main + self.beside

    @classmethod
    def unpacked(cls, data: bytes) -> Binary:
        """The binary that `packed` made these bytes of."""
        end = 8 + int.from_bytes(data[:8], "little")
        return cls(data[8:end], data[end:])


@dataclass(frozen=True)
class Loaded:
    """A kernel in memory.

    Attributes:
        address: of its entry.
        beside: of the entry of the Linalg IR; 0 if there is none.
        workspace: bytes of global memory for each program.
        locks: that its programs take turns by.
        instructions, buffers: names of the final module's, in order; none for Linalg IR.
        libraries: keep the shared objects loaded.
    """

    address: int
    beside: int
    workspace: int
    locks: int
    instructions: tuple[str, ...]
    buffers: tuple[str, ...]
    libraries: tuple[ctypes.CDLL, ...]


loaded: dict[int, Loaded] = {}
"""By the address of the entry, which Triton passes to a launch."""


def load(binary: Binary, entry: str) -> Loaded:
    """Load the shared objects of a binary."""
    runtime()
    libraries: tuple[ctypes.CDLL, ...] = (_load(binary.main),)
    if binary.beside:
        with contextlib.suppress(OSError):  # the Linalg IR needs a function that this host lacks: nothing is compared
            libraries += (_load(binary.beside),)
    addresses = [ctypes.cast(getattr(library, entry), ctypes.c_void_p).value or 0 for library in libraries]
    main, beside = libraries[0], addresses[1] if len(addresses) > 1 else 0
    workspace, locks = (_number(main, symbol) for symbol in (WORKSPACE, LOCKS))
    instructions, buffers = tuple(_text(main, INSTRUCTIONS).split()), tuple(filter(None, _text(main, BUFFERS).split(";")))
    found = Loaded(addresses[0], beside, workspace, locks, instructions, buffers, libraries)
    loaded[found.address] = found
    return found


def _number(library: ctypes.CDLL, symbol: str) -> int:
    return ctypes.c_int64.in_dll(library, symbol).value if hasattr(library, symbol) else 0


def _text(library: ctypes.CDLL, symbol: str) -> str:
    if not hasattr(library, symbol):
        return ""
    return ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(library, symbol))).decode()


def _load(data: bytes) -> ctypes.CDLL:
    with tempfile.NamedTemporaryFile(dir=private_folder("loading"), suffix=".so") as file:  # which no other user can change
        file.write(data)
        file.flush()
        return ctypes.CDLL(file.name)


def _cc(*arguments: str | Path) -> None:
    done = run([*c_compiler(), *arguments])
    if done.returncode:
        raise CompilationError(f"{c_compiler()[0]} failed:\n{reason(done.stderr)}")
