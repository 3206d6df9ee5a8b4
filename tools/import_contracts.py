"""What may import what, for import-linter: `hatch run imports`. The contracts cover every module of every package."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from configparser import ConfigParser
from pathlib import Path

from importlinter.cli import lint_imports

from . import layers
from .workspace import CORE, ROOT, Package, read_packages

DEVICE = "device"  # the module of the core that imports Triton
KERNEL = "@triton.jit"  # what a page of kernels has


def contracts(packages: Iterable[Package], root: Path = ROOT) -> dict[str, Mapping[str, str]]:
    """The configuration of import-linter, section by section."""
    packages = list(packages)
    modules = [package.module for package in packages]
    operators = [package.module for package in packages if package.is_operator]
    (core,) = (package.module for package in packages if package.name == CORE)
    development = [module for module in modules if module not in (core, *operators)]
    of_core = _modules(packages, root, core)
    device = [name for name in of_core if _is_in(name, 1, DEVICE)]
    host = [name for name in of_core if name not in device]
    of_operators = [name for module in operators for name in _modules(packages, root, module, containing=KERNEL)]
    written: dict[str, dict[str, str | list[str]]] = {
        "Operators do not import each other": {"type": "independence", "modules": operators},
        "Operators import no development package": _forbid(operators, development),
        "The core imports nothing of ours": _forbid([core], [*operators, *development]),
        f"Of the core {DEVICE} alone imports Triton": {
            **_forbid_modules(host, ["triton"]),
            "allow_indirect_imports": "True",
        },
        f"{DEVICE} imports nothing else of the core": _forbid_modules(device, ["torch", *host]),
        "Pages of kernels import no PyTorch": {**_forbid(of_operators, ["torch"]), "allow_indirect_imports": "True"},
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


def _modules(packages: Iterable[Package], root: Path, module: str, containing: str = "") -> list[str]:
    """The full names of all modules of one package with that text in them, folders of modules among them."""
    (folder,) = (package.folder for package in packages if package.module == module)
    source = root / folder / "src"
    paths = [path for path in sorted((source / module).rglob("*.py")) if containing in path.read_text()]
    return [".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__") for path in paths]


def _is_in(name: str, level: int, *folders: str) -> bool:
    """Whether that part of a module's full name is one of `folders`."""
    return name.split(".")[level : level + 1] in [[folder] for folder in folders]


def _layers(containers: list[str], order: Iterable[str]) -> dict[str, str | list[str]]:
    """Modules import no higher layer, and of their own where a colon stands. Every module is in one; one may be empty."""
    optional = [re.sub(r"\w+", r"(\g<0>)", layer) for layer in order]
    return {"type": "layers", "containers": containers, "layers": optional, "exhaustive": "True"}


def _forbid(sources: list[str], forbidden: list[str]) -> dict[str, str | list[str]]:
    return {"type": "forbidden", "source_modules": sources, "forbidden_modules": forbidden}


def _forbid_modules(sources: list[str], forbidden: list[str]) -> dict[str, str | list[str]]:
    """As `_forbid`, of modules alone: a folder's name stands for its `__init__.py`."""
    return {**_forbid(sources, forbidden), "as_packages": "False"}


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
