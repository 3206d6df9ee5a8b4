"""Where a kernel is defined, and what it does, read from its source: importing it would need Triton."""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from pathlib import Path
from typing import NamedTuple


class Definition(NamedTuple):
    """A kernel's definition.

    Attributes:
        place: its file and line.
        summary: the first line of its docstring; empty where it has none.
        parameters: their names, in order.
    """

    place: str
    summary: str = ""
    parameters: tuple[str, ...] = ()


@functools.cache
def definition(module: str, kernel: str) -> Definition:
    """That of a kernel; its place is the module where there is no source."""
    top, *names = module.split(".")
    spec = importlib.util.find_spec(top) if top not in sys.modules else sys.modules[top].__spec__
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec is not None else []
    for folder in folders:
        for file in (folder.joinpath(*names).with_suffix(".py"), folder.joinpath(*names, "__init__.py")):
            if file.is_file():
                found = _functions(file).get(kernel)
                place = f"{file.relative_to(folder.parent)}:{1 if found is None else found.lineno}"
                return Definition(place) if found is None else Definition(place, *_said_of(found))
    return Definition(module)


def _said_of(function: ast.FunctionDef) -> tuple[str, tuple[str, ...]]:
    summary = (ast.get_docstring(function) or "").partition("\n")[0]
    return summary, tuple(argument.arg for argument in function.args.args)


@functools.cache
def _functions(file: Path) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}
