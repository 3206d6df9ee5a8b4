"""`python -m npu_tiling [PACKAGE ...]`: what is installed for kernels, what keeps them from running, and what mends it.

For every trainer that is installed it says which parts are ours, by which hook, and why the others are not. Every module of
device code of the packages that are named is imported.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from .cann import cann_version, expected_triton_ascend
from .trainers import EMBEDDING, LOSS, NORMS, report
from .triton import Problem, missing_wheel, triton_problem, version

_IMPORTS_TRITON = re.compile(r"^(?:(?:import|from) triton\b|from (?:npu_tiling\.device)?\.language import)", re.MULTILINE)
_SECONDS = 300  # torch from a cold disk takes tens of them
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # as PyTorch's installation page names it
DISTRIBUTIONS = ("torch", "torch_npu", "triton", "triton-ascend")
OURS = ("npu-tiling", NORMS, EMBEDDING, "npu-attn-res", LOSS, "npu-offline", "npu-bench")
_WITHOUT_CANN = (
    "Is CANN's set_env.sh sourced? On a machine without an NPU, pip uninstall -y torch_npu: "
    "TORCH_DEVICE_BACKEND_AUTOLOAD=0 is enough for torch alone, since transformers imports torch_npu itself."
)


def import_error(modules: Sequence[str]) -> tuple[str, str] | None:
    """The first of these modules that cannot be imported and the last line that Python says; None where all can be.

    They are imported in one process of their own.
    """
    code = f"import importlib\nfor name in {list(modules)}:\n    print(name, flush=True)\n    importlib.import_module(name)"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired as error:
        printed = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        return printed.split()[-1], f"it took more than {_SECONDS} s"
    if not done.returncode:
        return None
    said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    begun = [line for line in done.stdout.splitlines() if line in modules]
    return begun[-1], said[-1]


def device_modules(package: str) -> list[str]:
    """Every module of an installed package that imports Triton, by its source; nothing is imported.

    Raises:
        ModuleNotFoundError: there is no such package.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"there is no package {package}")
    found = []
    for folder in map(Path, spec.submodule_search_locations):
        for file in sorted(folder.rglob("*.py")):
            if _IMPORTS_TRITON.search(file.read_text()):
                parts = file.relative_to(folder).with_suffix("").parts
                found.append(".".join([package, *(parts[:-1] if parts[-1] == "__init__" else parts)]))
    return found


def is_cuda_build() -> bool:
    """Whether the installed torch is a build with CUDA, by the file in which it says so; nothing is imported.

    What it requires does not tell: wheels for aarch64 without CUDA name what wheels for x86-64 require.
    """
    try:
        said = Path(str(importlib.metadata.distribution("torch").locate_file("torch/version.py"))).read_text()
    except (importlib.metadata.PackageNotFoundError, OSError):
        return False
    return re.search(r"^cuda\b.*= ['\"]", said, re.MULTILINE) is not None


def torch_npu_problems() -> list[Problem]:
    """What keeps the installed torch_npu from loading into the installed torch."""
    found = []
    torch, torch_npu = version("torch"), version("torch_npu")
    if torch and torch_npu and torch.split(".")[:2] != torch_npu.split(".")[:2]:
        cure = f"pip install torch=={'.'.join(torch_npu.split('.')[:3])}"
        found.append(Problem(f"torch_npu {torch_npu} is for another torch than {torch}.", (cure,)))
    if torch and torch_npu and is_cuda_build():
        release = torch.partition("+")[0]
        cure = f"pip install --force-reinstall --no-deps torch=={release} --index-url {TORCH_CPU_INDEX}"
        found.append(Problem(f"torch {torch} is a build with CUDA, into which torch_npu does not load.", (cure,)))
    return found


def problems(modules: Sequence[str] = (), *, ascend: bool | None = None) -> list[Problem]:
    """Everything that keeps kernels from running here, worst first.

    Args:
        modules: device code, which is imported.
        ascend: they are to run on Ascend, or to be compiled for it; None: where torch_npu is installed.
    """
    found = []
    ascend = version("torch_npu") is not None if ascend is None else ascend
    triton = triton_problem(ascend=ascend)
    if triton:
        found.append(triton)
    found += torch_npu_problems()
    if not found:
        here = {"torch": ("torch",), "torch_npu": ("torch_npu",), "triton": ("triton", "triton-ascend")}
        basis = [module for module, names in here.items() if any(map(version, names))]
        error = import_error([*basis, *modules])
        if error:
            module, said = error
            hint = f" {_WITHOUT_CANN}" if version("torch_npu") and module in ("torch", "torch_npu") else ""
            found.append(Problem(f"`import {module}` fails: {said.rstrip('.')}.{hint}"))
    return found


def main(
    packages: Sequence[str] = (), *, ascend: bool | None = None, more: Callable[[], list[Problem]] | None = None
) -> int:
    """Print what is here and what is wrong; returns the exit status, 1 where something is.

    Args:
        packages: whose device code is imported.
        ascend: as in `problems`.
        more: further problems, found by a package that builds on this one.

    Raises:
        ModuleNotFoundError: there is no such package; nothing was printed.
    """
    modules = {package: device_modules(package) for package in packages}
    print(f"Python {platform.python_version()} ({sys.executable}), {platform.system()} on {platform.machine()}")
    for names in (DISTRIBUTIONS, OURS):
        print(", ".join(f"{name} {version(name) or 'not installed'}" for name in names))
    print(f"CANN: {os.environ.get('ASCEND_HOME_PATH') or 'ASCEND_HOME_PATH is not set (its set_env.sh sets it)'}")
    if expected_triton_ascend():
        print(f"CANN {cann_version()} takes triton-ascend {expected_triton_ascend()}")
    reason = missing_wheel()
    print(f"Ascend: {reason or 'triton-ascend has wheels for this Python and machine'}")
    for line in report():
        print(line)
    has_triton = bool(version("triton") or version("triton-ascend"))
    imports = [name for each in modules.values() for name in each] if has_triton else []
    found = problems(imports, ascend=ascend) + (more() if more else [])
    for problem in found:
        print(f"\nProblem: {problem.what}")
        for command in problem.cure:
            print(f"    {command}")
    if not found and has_triton:
        imported = "".join(f" {len(each)} modules of {name}'s kernels were imported." for name, each in modules.items())
        print(f"No problem found.{imported}")
    elif not found:
        left = f" No kernels of {', '.join(packages)} were imported." if packages else ""
        print(f"No problem found. Without a Triton, operators run on CPU tensors alone.{left}")
    return 1 if found else 0


def command_line(arguments: Sequence[str] | None = None) -> int:
    """`python -m npu_tiling`; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m npu_tiling", description=__doc__.partition(":")[2].strip())
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help="whose kernels are imported, as npu_rms_norm")
    options = parser.parse_args(arguments)
    try:
        return main(options.packages)
    except ModuleNotFoundError as error:
        parser.error(str(error))
