"""What users of a package rely on, written down: `hatch run api rms_norm` writes tests/public_api/rms_norm.txt.

One line for each public name, and for each public method of a class, with its signature and, before it, the release in which
it got that form; "Unreleased" for what changed since. A test holds the file against the package and wants every name with
that word, and those of lines that are gone, in the changelog's section "## Unreleased". `--release` puts the version there.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .changelog import UNRELEASED
from .workspace import ROOT, Package, read_packages

FOLDER = Path("tests", "public_api")
REMOVED = "(removed)"


def describe(package: Package) -> list[str]:
    """One line for everything public."""
    lines: list[str] = []
    module = importlib.import_module(package.module)
    for name in sorted(module.__all__):
        lines += _describe(name, getattr(module, name))
    return lines


def _describe(name: str, value: Any) -> Iterator[str]:
    if not inspect.isclass(value):
        yield f"{name}{_signature(value)}" if callable(value) else f"{name}: {type(value).__name__}"
        return
    shared = [base for base in value.__bases__ if base.__name__.startswith("_") and base.__module__ == value.__module__]
    public = [base for one in (value, *shared) for base in one.__bases__ if base not in (object, *shared)]
    bases = ", ".join(base.__name__ for base in public)
    yield f"{name}{_signature(value)}" + (f" is a {bases}" if bases else "")
    members = {attribute: member for one in (*shared, value) for attribute, member in vars(one).items()}
    for attribute, member in sorted(members.items()):
        if attribute.startswith("_") and attribute not in ("__call__", "__enter__", "__exit__"):
            continue
        member = getattr(member, "__func__", member)  # of a class or static method
        if inspect.isfunction(member):
            yield f"{name}.{attribute}{_signature(member)}"
        elif isinstance(member, property):
            yield f"{name}.{attribute}: property"


class _Source(str):
    """An annotation as the source has it: `inspect` shows those that are strings in quotes."""

    def __repr__(self) -> str:
        return str(self).strip("\"'")


def _signature(value: Any) -> str:
    """Names, kinds, defaults and annotations."""
    try:
        signature = inspect.signature(value)
    except ValueError:  # a class made in C
        return "(...)"
    parameters = [each.replace(annotation=_plain(each.annotation)) for each in signature.parameters.values()]
    shown = str(signature.replace(parameters=parameters, return_annotation=_plain(signature.return_annotation)))
    return re.sub(r" at 0x\w+", "", shown)  # where a default lies in memory


def _plain(annotation: Any) -> Any:
    annotation = getattr(annotation, "__forward_arg__", annotation)  # of a named tuple
    return _Source(annotation) if isinstance(annotation, str) else annotation


def parse(content: str) -> dict[str, str]:
    """The release of every line of a file."""
    entries = (line.split(" ", 1) for line in content.splitlines())
    return {line: since for since, line in entries}


def text(lines: Mapping[str, str]) -> str:
    """A file's content."""
    return "".join(f"{since} {line}\n" for line, since in lines.items())


def read(file: Path) -> dict[str, str]:
    """A file's lines; none where there is no file."""
    return parse(file.read_text()) if file.exists() else {}


def updated(before: dict[str, str], now: Sequence[str], version: str) -> dict[str, str]:
    """The file's lines for the package as it is; all of them are `version`'s where there was no file."""
    if not before:
        return dict.fromkeys(now, version)
    after = {line: before.get(line, UNRELEASED) for line in now}
    names = {name_of(line) for line in now}
    for line, since in before.items():
        if name_of(line) not in names and (since != UNRELEASED or line.endswith(REMOVED)):
            after[f"{name_of(line)} {REMOVED}"] = UNRELEASED
    return after


def name_of(line: str) -> str:
    """What a line is about: RMSNorm.forward."""
    return line.split("(")[0].split(":")[0].strip()


def released(lines: dict[str, str], version: str) -> dict[str, str]:
    """The lines once `version` is out."""
    return {line: since.replace(UNRELEASED, version) for line, since in lines.items() if not line.endswith(REMOVED)}


def main(arguments: Sequence[str] | None = None) -> int:
    packages = read_packages()
    parser = argparse.ArgumentParser(prog="api", description=__doc__)
    parser.add_argument("package", nargs="*", help="default: every package")
    parser.add_argument("--release", action="store_true", help="what is unreleased belongs to the package's version")
    options = parser.parse_args(arguments)
    chosen = options.package or list(packages)
    if unknown := set(chosen) - set(packages):
        parser.error(f"{', '.join(unknown)}: must be one of {', '.join(packages)}")
    for key in chosen:
        file = ROOT / FOLDER / f"{key}.txt"
        file.parent.mkdir(exist_ok=True)
        version = packages[key].version
        lines = updated(read(file), describe(packages[key]), version)
        file.write_text(text(released(lines, version) if options.release else lines))
        print(file.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
