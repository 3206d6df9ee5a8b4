"""The reference of a package: what tests/public_api lists, from the docstrings."""

from __future__ import annotations

from tools import public_api
from tools.workspace import ROOT, read_packages


def _lines(package: str) -> dict[str, str]:
    """The line of everything public but methods, which stand below their class, by its full name."""
    module = read_packages()[package].module
    found = {}
    for line in public_api.read(ROOT / public_api.FOLDER / f"{package}.txt"):
        name = public_api.name_of(line).split(" ")[0]
        owner = name.rpartition(".")[0]
        if not line.endswith(public_api.REMOVED) and (not owner or owner.islower()):
            found[f"{module}.{name}"] = line
    return found


def public_names(package: str) -> list[str]:
    """The full name of everything public but methods."""
    return list(_lines(package))


def directives(package: str) -> str:
    """The mkdocstrings directives of its page."""
    # A named tuple has no signature of its own, and its fields have no docstrings.
    fields = "\n    options:\n      show_if_no_docstring: true"
    lines = _lines(package)
    return "\n\n".join(f"::: {name}" + fields * ("is a tuple" in line) for name, line in lines.items())
