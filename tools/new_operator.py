"""A new operator package to start from: `hatch run new-operator swiglu` makes packages/swiglu, which works and is tested.

It computes y = x * factor, in the modules that every operator has. .github/CONTRIBUTING.md says what to do with it.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from . import metadata
from .install_lines import install_lines
from .workspace import ROOT, read_packages, read_versions, torch_range

TEMPLATE = Path(__file__).parent / "template"


def render(name: str, folder: Path) -> None:
    """Write the package `name` to a folder that does not exist."""
    import copier  # for half a second

    versions = read_versions()
    major, minor, _ = read_packages()["npu_tiling"].version.split(".")
    distribution = f"npu-{name}".replace("_", "-")
    answers = {
        "name": name,
        "class": "".join(word.capitalize() for word in name.split("_")),
        "module": f"npu_{name}",
        "distribution": distribution,
        "install_lines": install_lines(distribution),
        "core": f">={major}.{minor},<{major}.{int(minor) + 1}",
        "torch": torch_range(versions),
        "pythons": versions["python"]["packages"],
    }
    copier.run_copy(str(TEMPLATE), folder, data=answers, quiet=True)
    shutil.copy(ROOT / "LICENSE", folder)
    project = folder / "pyproject.toml"
    project.write_text(metadata.fill(project.read_text(), Path("packages", name), metadata.read_project()))
    for command in (["check", "--fix", "--exit-zero"], ["format"]):  # the order of imports, say, depends on the name
        ruff = [sys.executable, "-m", "ruff", *command, "--quiet", "--config", str(ROOT / "ruff.toml")]
        subprocess.run([*ruff, str(folder)], check=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="new-operator", description=__doc__)
    parser.add_argument("name", help="as its function will be called: lower case, words joined by _")
    name = parser.parse_args(arguments).name
    folder = ROOT / "packages" / name
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        parser.error(f"the name is {name} and must be lower-case words joined by _")
    if folder.exists():
        parser.error(f"{folder.relative_to(ROOT)} exists")
    render(name, folder)
    print(f"{folder.relative_to(ROOT)} is there; .github/CONTRIBUTING.md says how to go on.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
