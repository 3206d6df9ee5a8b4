"""The pictures and the table in .github/ARCHITECTURE.md, drawn from the code: `hatch run generate`.

Boxes are packages, or the modules at the top of one, files and folders; an arrow goes from importer to imported. The table
has what the calls of the packages' tests launch in dry runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import grimp
from npu_tiling.explaining import ExplainedLaunch

from . import launches
from .workspace import Package, read_packages

PAGE = Path(".github", "ARCHITECTURE.md")
OPERATOR = "npu_rms_norm"  # the one whose modules are drawn: the others have the same
COLUMNS = ("Kernel", "Chips", "Directions", "Launched by", "Falls back to", "Partial sums are added by")
_TABLE = re.compile(r"(?P<head><!-- drawn: launches -->\n)(?:\|.*\n)*")
_PICTURE = re.compile(r"(?P<head><!-- drawn: (?P<name>\w+) -->\n```mermaid\n).*?(?=```\n)", re.DOTALL)


def draw(edges: Iterable[tuple[str, str]]) -> str:
    """A Mermaid diagram of who imports whom."""
    lines = [f"  {importer} --> {imported}" for importer, imported in sorted(set(edges))]
    return "\n".join(["flowchart TD", *lines]) + "\n"


def between_packages() -> list[tuple[str, str]]:
    """Which of our packages imports which."""
    modules = sorted(package.module for package in read_packages().values())
    graph = grimp.build_graph(*modules, cache_dir=None)
    return [(one, other) for one in modules for other in modules if one != other and _imports(graph, one, other)]


def inside(package: str, *, folders_alone: bool = False) -> list[tuple[str, str]]:
    """Which module at the top of a package imports which."""
    graph = grimp.build_graph(package, cache_dir=None)
    modules = sorted(module for module in graph.find_children(package) if not folders_alone or graph.find_children(module))
    return [
        (one.rpartition(".")[2], other.rpartition(".")[2])
        for one in modules
        for other in modules
        if one != other and _imports(graph, one, other)
    ]


def _imports(graph: grimp.ImportGraph, one: str, other: str) -> bool:
    return graph.direct_import_exists(importer=one, imported=other, as_packages=True)


def table() -> str:
    """Every kernel, the chips and directions that launch it, from where, and what follows."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for package in read_packages().values():
        if package.is_operator:
            lines += _rows(package)
    return "\n".join(lines) + "\n"


def _rows(package: Package) -> list[str]:
    kernels: dict[tuple[str, str], list[set[str]]] = {}
    folders = {other.module: other.folder for other in read_packages().values()}  # a kernel may be the core's
    for kind, chip in launches.TYPICAL_CHIPS.items():
        for _, explanation in launches.explained(package.key, chip):
            for launch in explanation.launches:
                cells = kernels.setdefault((launch.module, launch.kernel), [set() for _ in COLUMNS[1:]])
                for cell, value in zip(cells, _cells(kind, launch), strict=True):
                    cell.update(value)
    return [
        f"| [{kernel}](../{folders[module.partition('.')[0]]}/src/{module.replace('.', '/')}.py) | "
        + " | ".join(", ".join(sorted(cell)) for cell in cells)
        + " |"
        for (module, kernel), cells in sorted(kernels.items())
    ]


def _cells(kind: str, launch: ExplainedLaunch) -> tuple[set[str], ...]:
    file = launch.called_from.partition("/")[2].partition(":")[0]
    smaller = {f"`{name}`" for each in launch.fallback if not each.defined_at for name in each.changes}
    others = {
        f"`{each.kernel}`" if each.defined_at else each.kernel
        for each in launch.fallback
        if each.defined_at or not each.changes
    }
    sums = re.sub(r"(\S+_kernel)|\(\w+/(\S+):\d+\)", lambda found: f"`{found[1] or found[2]}`", launch.partials_added_by)
    return {kind}, {launch.direction}, {f"`{file}`: `{launch.caller}`"}, smaller | others, {sums} - {""}


def drawn(page: str) -> str:
    """The page with its pictures and its table as the code is now."""
    pictures = {
        "packages": between_packages,
        "operator": lambda: inside(OPERATOR),
        "offline": lambda: inside("npu_offline", folders_alone=True),
    }
    page = _PICTURE.sub(lambda found: found["head"] + draw(pictures[found["name"]]()), page)
    return _TABLE.sub(lambda found: found["head"] + table(), page)
