"""The reference of a package: what tests/public_api lists, from the docstrings, by what a reader looks for."""

from __future__ import annotations

from tools import public_api
from tools.workspace import ROOT, read_packages

KINDS = ("Functions", "Classes", "Results", "Errors", "Constants")


def _lines(package: str) -> dict[str, str]:
    """The line of everything public but what was removed, by its name in the package."""
    lines = public_api.read(ROOT / public_api.FOLDER / f"{package}.txt")
    return {public_api.name_of(line).split(" ")[0]: line for line in lines if not line.endswith(public_api.REMOVED)}


def public_names(package: str) -> list[str]:
    """The full name of everything public but methods."""
    return [f"{read_packages()[package].module}.{name}" for name in _lines(package) if "." not in name]


def _is_command(package: str, name: str) -> bool:
    """Whether the function has a module of its own name, as `explain` does."""
    found = read_packages()[package]
    return (ROOT / found.folder / "src" / found.module / f"{name}.py").exists()


def _kind(name: str, line: str) -> str:
    """One of `KINDS`."""
    if name.endswith("Error"):
        return "Errors"
    if "(" not in line:
        return "Constants"
    if "is a tuple" in line:
        return "Results"
    return "Functions" if name[0].islower() else "Classes"


def directives(package: str) -> str:
    """The mkdocstrings directives of its page, under a heading for each kind; first, what is named as the package."""
    module, lines = read_packages()[package].module, _lines(package)
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for name, line in lines.items():
        if "." not in name:
            methods = [each.rpartition(".")[2] for each in lines if each.rpartition(".")[0] == name]
            options, note = "", ""
            if "is a tuple" in line:  # its docstring lists its fields
                options = f"\n    options:\n      members: {methods or 'false'}"
            elif line.endswith("mappingproxy"):  # its value is an expression
                options = "\n    options:\n      show_attribute_values: false"
            elif _is_command(package, name):  # the module of its name is found first, and has what the command needs, too
                options = f"\n    options:\n      members: [{name}]\n      show_docstring_parameters: false"
                note = f"\n\nWhat each option is: `python -m {module} {name} --help`."
            found[_kind(name, line)].append(f"::: {module}.{name}{options}{note}")
    for directives_of in (found["Functions"], found["Classes"]):  # a sort keeps the order of all others
        directives_of.sort(
            key=lambda directive: directive.rpartition(".")[2].lower() not in (package, package.replace("_", ""))
        )
    return "\n\n".join("\n\n".join((f"## {kind}", *each)) for kind, each in found.items() if each)
