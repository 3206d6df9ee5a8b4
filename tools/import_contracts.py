"""What may import what, for import-linter: `hatch run imports`. The contracts cover every module of every package."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Mapping
from configparser import ConfigParser
from pathlib import Path

from importlinter.cli import lint_imports

from . import layers
from .workspace import CORE, ROOT, Package, read_packages


def contracts(packages: Iterable[Package], root: Path = ROOT) -> dict[str, Mapping[str, str]]:
    """The configuration of import-linter, section by section."""
    packages = list(packages)
    modules = [package.module for package in packages]
    operators = [package.module for package in packages if package.is_operator]
    (core,) = (package.module for package in packages if package.name == CORE)
    development = [module for module in modules if module not in (core, *operators)]
    kernels = [f"{module}.{name}" for module, name in _modules(packages, root) if name.startswith("kernels")]
    tilings = [f"{module}.{name}" for module, name in _modules(packages, root) if name.startswith("tiling")]
    written: dict[str, dict[str, str | list[str]]] = {
        "Operators do not import each other": {"type": "independence", "modules": operators},
        "Operators import no development package": _forbid(operators, development),
        "The core imports nothing of ours, and no Triton": _forbid([core], [*operators, *development, "triton"]),
        "Device code imports no PyTorch": _forbid(kernels, ["torch", core]),
        "Tiling imports neither Triton nor device code": _forbid(tilings, ["triton", *kernels]),
        "Data flows one way": _layers(operators, layers.OPERATOR),
        "No circles": {"type": "acyclic_siblings", "ancestors": modules},
        f"Layers of {core}": _layers([core], layers.CORE),
    }
    for folder, order in layers.FOLDERS.items():
        if folder.partition(".")[0] in development:
            written[f"Layers of {folder}"] = _layers([folder], order)
    sections: dict[str, Mapping[str, str]] = {
        "importlinter": {
            "root_packages": _lines(modules),
            "include_external_packages": "True",
            "exclude_type_checking_imports": "False",  # a type is a dependency too: it decides where a reader has to look
        }
    }
    for number, (name, contract) in enumerate(written.items()):
        options = {key: value if isinstance(value, str) else _lines(value) for key, value in contract.items()}
        sections[f"importlinter:contract:{number}"] = {"name": name, **options}
    return sections


def _modules(packages: Iterable[Package], root: Path) -> Iterable[tuple[str, str]]:
    """The package and the name of every module, and of every folder of modules, of the operators."""
    for package in packages:
        if package.is_operator:
            source = root / package.folder / "src" / package.module
            for path in sorted([*source.glob("*.py"), *source.glob("*/__init__.py")]):
                yield package.module, path.parent.name if path.parent != source else path.stem


def _layers(containers: list[str], order: Iterable[str]) -> dict[str, str | list[str]]:
    """Modules of a layer import neither each other nor higher layers; every module is in one, and a layer may be empty."""
    optional = [" | ".join(f"({name})" for name in layer.split(" | ")) for layer in order]
    return {"type": "layers", "containers": containers, "layers": optional, "exhaustive": "True"}


def _forbid(sources: list[str], forbidden: list[str]) -> dict[str, str | list[str]]:
    return {"type": "forbidden", "source_modules": sources, "forbidden_modules": forbidden}


def _lines(values: Iterable[str]) -> str:
    return "\n" + "\n".join(values)


def main() -> int:
    config = ConfigParser()
    config.read_dict(contracts(read_packages().values()))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "contracts.ini")
        with file.open("w") as opened:
            config.write(opened)
        return lint_imports(config_filename=str(file), no_cache=True)


if __name__ == "__main__":
    sys.exit(main())
