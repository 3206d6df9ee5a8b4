"""Loads Python files that define kernels, and finds their kernels with autotuning and heuristics taken off."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.machinery
import importlib.util
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import OfflineError
from ..execute.recording import record
from ..toolchain.triton_ascend import missing_triton_ascend
from .absent import import_without, imported, later_names, torch_npu_stand_in


def load_file(path: Path, *, partly: bool = False) -> ModuleType:
    """Import a Python file, with its folder on the path, as Python does for a program, and with Triton's driver a recorder.

    A file with relative imports is imported as a module of its package. Where torch_npu is not installed, an empty module
    stands in its place.

    Args:
        path: the file.
        partly: accept a file that fails after it has defined kernels, such as a program that goes on to run them on a chip,
            and one that imports what is not installed.

    Raises:
        OfflineError: it does not exist, or fails.
    """
    if not path.is_file():
        raise OfflineError(f"{path} does not exist")
    root, name = _place(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    loader = spec.loader
    assert loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    problem, missing = None, []

    def execute() -> None:
        if "." in name:
            _import_packages(root, name)
        with imported({name: module}):  # dataclasses look for it there
            loader.exec_module(module)

    # Autotuning asks for a driver where it decorates. Without triton-ascend, on a CUDA machine, there is Triton's own.
    there = not missing_triton_ascend()
    with (
        _no_torch_npu(),
        record() if there else contextlib.nullcontext(),
        imported(later_names()) if there else contextlib.nullcontext(),
    ):
        try:
            if partly:
                missing = import_without(execute)
            else:
                execute()
        except Exception as error:
            problem = error
    if problem is not None:
        for other in list(sys.modules.values()):  # what it imports may have imported it, under the name that it has there
            if getattr(other, "__file__", None) == str(path.resolve()) and kernels_of(other):
                return other
        frames = [frame.lineno for frame in traceback.extract_tb(problem.__traceback__) if frame.filename == str(path)]
        line = f" at line {frames[-1]}" if frames else ""
        said = f"{path} fails{line}: {type(problem).__name__}: {problem}"
        if not partly or not kernels_of(module):
            raise OfflineError(said) from problem
        print(f"npu-offline: {said}; the kernels above are used", file=sys.stderr)
    if missing:
        print(f"npu-offline: {path} runs without {', '.join(missing)}: not installed", file=sys.stderr)
    return module


def _place(path: Path) -> tuple[Path, str]:
    """The folder to import a file from, and the name of its module: in its package where it has relative imports."""
    path = path.resolve()
    try:
        tree = ast.parse(path.read_text())
    except (SyntaxError, UnicodeDecodeError):
        return path.parent, f"npu_offline_file_{path.stem}"
    if not any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(tree)):
        return path.parent, f"npu_offline_file_{path.stem}"
    root = path.parent
    while (root / "__init__.py").is_file() and root != root.parent:
        root = root.parent
    return root, ".".join(path.relative_to(root).with_suffix("").parts)


def _import_packages(root: Path, name: str) -> None:
    """Import the packages that a module is in; an empty one stands in place of a package that fails, for lack of others."""
    parts = name.split(".")[:-1]
    for count in range(1, len(parts) + 1):
        package = ".".join(parts[:count])
        try:
            importlib.import_module(package)
        except Exception:
            empty = ModuleType(package)
            empty.__path__ = [str(root.joinpath(*parts[:count]))]
            sys.modules[package] = empty


@contextlib.contextmanager
def _no_torch_npu() -> Iterator[None]:
    """Until the block ends, `import torch_npu` finds a stand-in, unless it is installed."""
    if "torch_npu" in sys.modules or importlib.util.find_spec("torch_npu"):
        yield
        return
    with imported({"torch_npu": torch_npu_stand_in()}):
        yield


def kernels_of(module: ModuleType) -> dict[str, Any]:
    """The kernels that a module defines or imports, by name, with what stands around them."""
    from triton.runtime.jit import JITFunction

    return {name: value for name, value in vars(module).items() if isinstance(jit_function(value), JITFunction)}


def jit_function(value: Any) -> Any:
    """What `@triton.jit` made, without autotuning and heuristics around it."""
    while type(value).__module__.startswith("triton.runtime.auto"):
        value = value.fn
    return value


def configurations(value: Any) -> list[dict[str, Any]]:
    """The sizes of each of an autotuned kernel's configurations, those that differ in what Ascend ignores (num_warps,
    num_stages) once; none for other kernels."""
    while type(value).__module__.startswith("triton.runtime.auto"):
        if hasattr(value, "configs"):
            found: list[dict[str, Any]] = []
            for configuration in value.configs:
                if configuration.kwargs not in found:
                    found.append(dict(configuration.kwargs))
            return found
        value = value.fn
    return []


def heuristics(value: Any) -> Mapping[str, Any]:
    """Functions of the arguments for those that `@triton.heuristics` computes, by name."""
    found: dict[str, Any] = {}
    while type(value).__module__.startswith("triton.runtime.auto"):
        found = {**getattr(value, "values", {}), **found}
        value = value.fn
    return found
