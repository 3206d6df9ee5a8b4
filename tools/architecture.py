"""The pictures in .github/ARCHITECTURE.md, drawn from what the code imports: `python -m tools.architecture`.

Boxes are packages, or the modules at the top of one, files and folders; an arrow goes from importer to imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import grimp

from .workspace import ROOT, read_packages

PAGE = Path(".github", "ARCHITECTURE.md")
OPERATOR = "npu_rms_norm"  # the one whose modules are drawn: the others have the same
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


def drawn(page: str) -> str:
    """The page with its pictures as the code is now."""
    pictures = {
        "packages": between_packages,
        "operator": lambda: inside(OPERATOR),
        "offline": lambda: inside("npu_offline", folders_alone=True),
    }
    return _PICTURE.sub(lambda found: found["head"] + draw(pictures[found["name"]]()), page)


def main() -> None:
    page = ROOT / PAGE
    page.write_text(drawn(page.read_text()))


if __name__ == "__main__":
    main()
