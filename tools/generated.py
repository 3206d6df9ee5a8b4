"""Files that are written from code and records: `hatch run generate`. `hatch run lint` names those that are out of date."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from . import architecture, metadata
from .compare import page as points
from .docs import charts
from .workspace import ROOT, read_packages


def files() -> Iterator[tuple[Path, str]]:
    """Each file, and what it has to say."""
    project = metadata.read_project()
    for package in read_packages().values():
        file = ROOT / package.folder / "pyproject.toml"
        yield file, metadata.fill(file.read_text(), package.folder, project)
    yield charts.PICTURE, charts.bars((ROOT / "README.md").read_text(), alone=True) + "\n"
    yield charts.PREDICTED_PICTURE, charts.predicted_bars(charts.PREDICTED, alone=True) + "\n"
    yield points.PAGE, points.rendered(points.load())
    yield ROOT / architecture.PAGE, architecture.drawn((ROOT / architecture.PAGE).read_text())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="hatch run generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a file is out of date")
    check = parser.parse_args(arguments).check
    stale = [(file, text) for file, text in files() if not file.is_file() or file.read_text() != text]
    for file, text in stale:
        print(f"{file.relative_to(ROOT)} is out of date: hatch run generate" if check else file.relative_to(ROOT))
        if not check:
            file.write_text(text)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
