"""Builds the stand-in of CANN: libraries, headers and programs where torch_npu and triton-ascend look for them."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..errors import CompilationError, ToolchainMissingError
from ..toolchain.cache import cache_dir
from ..toolchain.processes import run

_SOURCES = Path(__file__).with_name("csrc")
_LAUNCH = Path(__file__).parents[1] / "execute" / "runtime" / "launch.h"
_RUNTIME = ("memory", "streams", "devices", "kernels", "profiler")
_PYTORCH = {  # libraries that include PyTorch's headers, and what they are linked to
    "opapi": ("libopapi.so", ("-lruntime", "-ltorch_cpu", "-lc10")),
    "aten": ("libnpu_offline_aten.so", ("-lruntime", "-ltorch_npu", "-ltorch_cpu", "-lc10")),
}
_ALIASES = ("libhccl", "libascendcl", "libacl_op_compiler", "libge_runner", "libgraph", "libacl_tdt_channel")
_IGNORED = (  # functions without effect
    "aclmdlSetDump",
    "aclopStartDumpArgs",
    "aclopStopDumpArgs",
    "aclprofFinalize",
    "aclprofInit",
    "aclrtDeviceEnablePeerAccess",
    "HcclSetConfig",
)
_OF_CANN = re.compile(r"(acl|rt|Hccl|Msprof|tdt)[A-Z]|acl(rt|mdl|op|tdt)")
_PROGRAMS = {
    "bisheng": '#!/bin/sh\n[ "$1" = -print-targets ] && { echo "  hiipu64 - stand-in"; exit 0; }\nexit 1\n',
    # triton-ascend asks it for its help twice for each kernel.
    "bishengir-compile": f"""#!/bin/sh
[ "$1" = --help ] || [ "$1" = --version ] && exec "$NPU_OFFLINE_CANN_COMPILER" "$1"
exec {sys.executable} -c 'from npu_offline.cann.compiler import main; main()' "$@"
""",
}
_ENTRY_POINTS = "[torch.backends]\nnpu_offline_cann = npu_offline.cann.operators:install\n"


def build() -> Path:
    """The stand-in's folder; it is built once for these sources and versions of torch and torch_npu.

    Raises:
        ToolchainMissingError: torch_npu or a C++ compiler is missing.
        CompilationError: the C++ compiler refused a source.
    """
    for program in ("g++", "nm"):
        if not shutil.which(program):
            raise ToolchainMissingError(f"the stand-in of CANN needs {program}: install GCC for C++ and binutils")
    digest = hashlib.sha256("\n".join([*versions("torch", "torch_npu"), sys.executable]).encode())
    for path in sorted([Path(__file__), _LAUNCH, *_SOURCES.rglob("*.*")]):
        digest.update(path.read_bytes())
    folder = cache_dir() / "cann" / digest.hexdigest()[:32]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the others of a parallel run wait
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=folder.parent) as staging:
                _build(Path(staging) / "cann")
                os.rename(Path(staging) / "cann", folder)
    return folder


def versions(*names: str) -> list[str]:
    """The versions of installed distributions, with their names.

    Raises:
        ToolchainMissingError: one is not installed.
    """
    try:
        return [f"{name} {importlib.metadata.version(name)}" for name in names]
    except importlib.metadata.PackageNotFoundError as error:
        raise ToolchainMissingError(
            f"{error.name} is not installed (pip install torch torch_npu, in an environment apart)"
        ) from None


def _build(folder: Path) -> None:
    packages = Path(sysconfig.get_paths()["purelib"])
    npu, torch = packages / "torch_npu", packages / "torch"
    acl = npu / "include/third_party/acl/inc"
    libraries = folder / "lib64"
    for name in ("lib64", "bin", "opp", "runtime", "compiler", "python/npu_offline_cann-0.dist-info"):
        (folder / name).mkdir(parents=True)
    shutil.copytree(_SOURCES / "include", folder / "include")
    for name in ("acl", "profiling", "ge", "graph"):
        (folder / "include" / name).symlink_to(acl / name)
    for name, text in _PROGRAMS.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    metadata = folder / "python/npu_offline_cann-0.dist-info"
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: npu-offline-cann\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(_ENTRY_POINTS)
    headers = [f"-I{npu}/include", f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
    include = [f"-I{acl}", f"-I{folder}/include/experiment", f"-I{_SOURCES}", f"-I{_LAUNCH.parent}"]
    compile_cpp = ["g++", "-std=c++20", "-O1", "-fPIC", "-w", *include]

    def compiled(name: str) -> Path:
        target = folder / f"{name}.o"
        _run(*compile_cpp, *(headers if name in _PYTORCH else ()), "-c", _SOURCES / f"{name}.cpp", "-o", target)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        built = dict(zip((*_PYTORCH, *_RUNTIME), pool.map(compiled, (*_PYTORCH, *_RUNTIME)), strict=True))
    objects = [built[name] for name in _RUNTIME]
    rest = folder / "rest.cpp"
    rest.write_text(_rest(_symbols(objects, "--defined-only"), [*npu.glob("lib/*.so"), *npu.glob("_C.*.so")]))
    link = ["-shared", "-Wl,-rpath,$ORIGIN"]
    runtime = "libruntime.so"
    _run(*compile_cpp, *link, f"-Wl,-soname,{runtime}", *objects, rest, "-o", libraries / runtime, "-ldl")
    for name in _ALIASES:
        soname = f"-Wl,-soname,{name}.so"
        _run("g++", *link, soname, "-Wl,--no-as-needed", f"-L{libraries}", "-lruntime", "-o", libraries / f"{name}.so")
    places = [f"-L{libraries}", f"-L{torch}/lib", f"-L{npu}/lib", f"-Wl,-rpath,{torch}/lib:{npu}/lib"]
    for name, (library, linked) in _PYTORCH.items():
        _run("g++", *link, f"-Wl,-soname,{library}", built[name], "-o", libraries / library, *places, *linked)
    for path in (*built.values(), rest):
        path.unlink()


def _rest(defined: set[str], libraries: Iterable[Path]) -> str:
    """Every other function of CANN that torch_npu is linked to: it fails with a message that it has no stand-in.

    Functions that torch_npu looks up by name at run time may be missing, as in an older CANN.
    """
    wanted = {symbol for symbol in _symbols(libraries, "-D", "--undefined-only") if _OF_CANN.match(symbol)}
    lines = ['extern "C" int standin_missing(const char *), standin_ignored(const char *);']
    for symbols, answer in ((wanted - defined - set(_IGNORED), "missing"), (set(_IGNORED) - defined, "ignored")):
        lines += [_function(symbol, answer) for symbol in sorted(symbols)]
    return "\n".join(lines) + "\n"


def _function(symbol: str, answer: str) -> str:
    visible = '__attribute__((visibility("default")))'
    return f'extern "C" {visible} int {symbol}() {{ return standin_{answer}("{symbol}"); }}'


def _symbols(paths: Iterable[Path], *flags: str) -> set[str]:
    found = set()
    for path in paths:
        listed = run(["nm", *flags, str(path)]).stdout
        found |= {line.split()[-1].split("@")[0] for line in listed.splitlines() if line.strip()}
    return found


def _run(*command: str | Path) -> None:
    done = run([str(word) for word in command])
    if done.returncode:
        raise CompilationError(f"{command[0]} failed:\n{done.stderr[-3000:]}")
