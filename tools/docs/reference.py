"""The reference of a package: what tests/public_api lists, from the docstrings."""

from __future__ import annotations

from tools import public_api
from tools.workspace import ROOT, read_packages


def public_names(package: str) -> list[str]:
    """The full name of everything public but methods, which stand below their class."""
    module = read_packages()[package].module
    names = []
    for line in public_api.read(ROOT / public_api.FOLDER / f"{package}.txt"):
        name = public_api.name_of(line)
        if line.endswith(public_api.REMOVED):
            continue
        name = name.split(" ")[0]
        owner = name.rpartition(".")[0]
        if not owner or owner.islower():
            names.append(f"{module}.{name}")
    return names


def directives(package: str) -> str:
    """The mkdocstrings directives of its page."""
    return "\n\n".join(f"::: {name}" for name in public_names(package))
