"""What every pyproject.toml says alike: `hatch run generate` writes authors, links, build tools there."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from .workspace import ROOT


def read_project(root: Path = ROOT) -> dict[str, Any]:
    """tools/project.toml."""
    return tomllib.loads((root / "tools" / "project.toml").read_text())


def fill(text: str, folder: Path, project: dict[str, Any]) -> str:
    """The text of a package's pyproject.toml with what every package says.

    Args:
        text: as it is; `license-files` is in it, and `[tool.` begins what is not the project's.
        folder: of the package, from the root.
        project: `read_project()`.
    """
    fields = [", ".join(f"{key} = {json.dumps(value)}" for key, value in author.items()) for author in project["authors"]]
    authors = ", ".join(f"{{ {of_one} }}" for of_one in fields)
    tools = json.dumps(project["build-requires"])
    text = re.sub(r"^requires = .*$", f"requires = {tools}", text, count=1, flags=re.M)
    text = re.sub(r"^authors = .*\n", "", text, flags=re.M)
    text = re.sub(r"^(license-files = .*\n)", lambda found: f"{found[1]}authors = [{authors}]\n", text, count=1, flags=re.M)
    text = re.sub(r"^\[project\.urls\]\n(?:[^\[\n].*\n)*\n?", "", text, flags=re.M)
    if project["urls"]:
        links = "".join(f"{name} = {json.dumps(url.format(folder=folder))}\n" for name, url in project["urls"].items())
        text = re.sub(r"^\[tool\.", lambda _: f"[project.urls]\n{links}\n[tool.", text, count=1, flags=re.M)
    return text
