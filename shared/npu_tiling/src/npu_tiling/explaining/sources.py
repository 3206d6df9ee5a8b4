"""Where a kernel is defined, and what it does, read from its source: importing it would need Triton."""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from pathlib import Path


def definition(module: str, kernel: str) -> tuple[str, str]:
    """File and line of a kernel, and the first line of its docstring, empty where it has none."""
    top, *names = module.split(".")
    spec = importlib.util.find_spec(top) if top not in sys.modules else sys.modules[top].__spec__
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec is not None else []
    for folder in folders:
        for file in (folder.joinpath(*names).with_suffix(".py"), folder.joinpath(*names, "__init__.py")):
            if file.is_file():
                line, summary = _functions(file).get(kernel, (1, ""))
                return f"{file.relative_to(folder.parent)}:{line}", summary
    return module, ""


@functools.cache
def _functions(file: Path) -> dict[str, tuple[int, str]]:
    """The line and the first line of the docstring of every function of a file."""
    functions = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
    return {node.name: (node.lineno, (ast.get_docstring(node) or "").partition("\n")[0]) for node in functions}
