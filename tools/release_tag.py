"""What a tag releases: `hatch run ci:release-tag npu-rms-norm-v0.2.0` prints key, folder, name and the torch to test with.

With --notes it prints what the changelog says of the release.

An error unless the tag's version is that of pyproject.toml and of the topmost section of the changelog, the public API has
nothing unreleased, and the main branch has the commit that is checked out.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from . import changelog
from .workspace import ROOT, Package, read_packages, read_versions

MAIN = "origin/main"


def released_by(tag: str, root: Path = ROOT) -> Package:
    """The package; a ValueError if the tag does not say what the files say."""
    name, _, version = tag.rpartition("-v")
    package = next((package for package in read_packages(root).values() if package.name == name), None)
    if package is None:
        raise ValueError(f"{tag} names no package.")
    if version != package.version:
        raise ValueError(f"{tag}: the version in {package.folder}/pyproject.toml is {package.version}.")
    topmost = next(iter(changelog.sections((root / package.folder / "CHANGELOG.md").read_text())), None)
    if topmost != version:
        raise ValueError(f"{tag}: {package.folder}/CHANGELOG.md starts with {topmost}.")
    listed = Path("tests", "public_api", f"{package.key}.txt")
    if changelog.UNRELEASED in (line.split(" ")[0] for line in (root / listed).read_text().splitlines()):
        raise ValueError(f"{tag}: {listed} has unreleased names: `hatch run api {package.key} --release`.")
    return package


def require_merged(root: Path = ROOT) -> None:
    """A ValueError unless the main branch has the current commit: what is released went through a pull request."""
    command = ["git", "merge-base", "--is-ancestor", "HEAD", MAIN]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode == 1:
        raise ValueError(
            f"{MAIN} has not the commit that is checked out: merge it, `git fetch`, and check out what was merged."
        )
    if done.returncode:
        raise ValueError(f"git cannot compare with {MAIN}: {done.stderr.strip()}")


if __name__ == "__main__":
    try:
        package = released_by(sys.argv[1])
        require_merged()
        if "--notes" in sys.argv:
            print(changelog.notes((ROOT / package.folder / "CHANGELOG.md").read_text(), package.version), end="")
        else:
            print(f"package={package.key}\nfolder={package.folder}\nname={package.name}")
            print(f"torch={read_versions()['torch']['newest']}")
    except ValueError as error:
        sys.exit(str(error))
