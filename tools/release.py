"""Release one package: `hatch run release rms_norm minor`, first with `--dry-run`; once that is merged, `... rms_norm tag`.

The first command bumps the version, gives the changelog's "## Unreleased" and the public API's changes that version, tries
the package with the lowest npu-tiling that it allows, and commits to a branch of its own: the main branch takes nothing but
pull requests. The second tags what was merged; pushing the tag starts the release workflow. "first" prepares a package that
has no release yet, under the version that it has; what is unreleased in its changelog belongs to it.
"""

from __future__ import annotations

import argparse
import difflib
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from . import changelog, public_api, release_tag
from .lowest_core import try_with_lowest_core
from .workspace import CORE, ROOT, Package, read_packages

PARTS = ("first", "patch", "minor", "major")
TAG = "tag"


class ReleaseError(Exception):
    """Why there can be no release."""


@dataclass(frozen=True)
class Release:
    """A release that has not been made yet.

    Attributes:
        package: what is released, as it is before.
        version: what it will be.
        texts: new contents of the files that change, by path from the root.
    """

    package: Package
    version: str
    texts: Mapping[Path, str]

    @property
    def tag(self) -> str:
        return f"{self.package.name}-v{self.version}"


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, stdout=subprocess.PIPE, text=True).stdout


def plan(root: Path, key: str, part: str) -> Release:
    """The release, or a ReleaseError."""
    package = read_packages(root)[key]
    _refuse_changes(root)
    log_path = package.folder / "CHANGELOG.md"
    log = (root / log_path).read_text()
    if changelog.latest_release(log) != package.version:
        raise ReleaseError(f"{log_path}: its latest release is not {package.version}, the version in pyproject.toml.")
    unreleased = changelog.sections(log).get(changelog.UNRELEASED)
    if part == "first":
        if earlier := git(root, "tag", "--list", f"{package.name}-v*").split():
            raise ReleaseError(f"{package.name} has been released: {', '.join(earlier)}.")
        texts = _texts(root, package, package.version, log_path, log)
        release = Release(
            package, package.version, {path: text for path, text in texts.items() if text != (root / path).read_text()}
        )
    else:
        if not unreleased:
            raise ReleaseError(f'{log_path} has nothing under "## Unreleased" to release.')
        version = bump(package.version, part)
        release = Release(package, version, _texts(root, package, version, log_path, log))
    if git(root, "tag", "--list", release.tag):
        raise ReleaseError(f"The tag {release.tag} exists.")
    return release


def _refuse_changes(root: Path) -> None:
    if changed := git(root, "status", "--porcelain").strip():
        raise ReleaseError(f"The working tree has changes; commit them or put them away:\n{changed}")


def bump(version: str, part: str) -> str:
    """The next version: `part` one higher, what follows it zero."""
    numbers = list(Version(version).release)
    place = ("major", "minor", "patch").index(part)
    return ".".join(map(str, [*numbers[:place], numbers[place] + 1, *[0] * (2 - place)]))


def _texts(root: Path, package: Package, version: str, log_path: Path, log: str) -> dict[Path, str]:
    project_path = package.folder / "pyproject.toml"
    project = (root / project_path).read_text()
    texts = {
        project_path: re.sub(r'^version = ".*"$', f'version = "{version}"', project, count=1, flags=re.MULTILINE),
        log_path: changelog.release(log, version),
    }
    api_path = public_api.FOLDER / f"{package.key}.txt"
    api = public_api.released(public_api.parse((root / api_path).read_text()), version)
    return {**texts, api_path: public_api.text(api)}


def left_behind(release: Release, packages: Mapping[str, Package]) -> list[str]:
    """Packages whose bounds exclude this release: they go on with the one before until they are changed and released."""
    requirements = ((package, package.needs(release.package.name)) for package in packages.values())
    return [package.key for package, needed in requirements if needed and release.version not in needed.specifier]


def show(release: Release, root: Path) -> None:
    """Print the diff of every file."""
    for path, text in release.texts.items():
        before = (root / path).read_text().splitlines(keepends=True)
        sys.stdout.writelines(difflib.unified_diff(before, text.splitlines(keepends=True), f"a/{path}", f"b/{path}"))


def make(release: Release, root: Path) -> str:
    """Write the files and commit them to a branch; returns its name."""
    branch = f"release-{release.tag}"
    git(root, "switch", "--quiet", "--create", branch)
    for path, text in release.texts.items():
        (root / path).write_text(text)
    git(root, "add", *map(str, release.texts))
    git(root, "commit", "--quiet", "--message", f"{release.package.name} {release.version}")
    return branch


def make_tag(root: Path, key: str, *, dry_run: bool = False) -> str:
    """Tag the current commit as the release of the version that the package has there; returns the tag.

    Raises:
        ReleaseError: the commit is no release, or not on the main branch.
    """
    package = read_packages(root)[key]
    tag = f"{package.name}-v{package.version}"
    _refuse_changes(root)
    if git(root, "tag", "--list", tag):
        raise ReleaseError(f"The tag {tag} exists.")
    try:
        release_tag.released_by(tag, root)
        release_tag.require_merged(root)
    except ValueError as error:
        raise ReleaseError(str(error)) from error
    if not dry_run:
        git(root, "tag", "--annotate", "--message", f"{package.name} {package.version}", tag)
    return tag


def push_command(reference: str) -> str:
    """Pushes a branch or a tag, and nothing else: GitHub starts no workflow where more than three tags come at once."""
    return f"git push origin {reference}"


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    packages = read_packages(root)
    parser = argparse.ArgumentParser(prog="release", description=__doc__)
    parser.add_argument("package", choices=sorted(packages))
    parser.add_argument("part", choices=(*PARTS, TAG), help="which part of the version grows; tag: what was merged")
    parser.add_argument("--dry-run", action="store_true", help="check and print everything, change nothing")
    options = parser.parse_args(arguments)
    try:
        if options.part == TAG:
            tag = make_tag(root, options.package, dry_run=options.dry_run)
            print(f"git tag --annotate {tag}")
            if not options.dry_run:
                print(f"Done. `{push_command(f'refs/tags/{tag}')}` starts the release workflow.")
            return 0
        release = plan(root, options.package, options.part)
        show(release, root)
        if release.package.needs(CORE):
            with tempfile.TemporaryDirectory() as folder:
                print(try_with_lowest_core(release.package, packages["npu_tiling"], root, Path(folder)))
    except (ReleaseError, RuntimeError) as error:
        print(f"No release: {error}", file=sys.stderr)
        return 1
    for key in left_behind(release, packages):
        print(f"{key} does not allow {release.package.name} {release.version}: raise its bounds, then release it.")
    last = f"`hatch run release {options.package} {TAG}`"
    if not release.texts:
        print(f"Nothing to commit: {last} tags this commit.")
        return 0
    print(f"git commit --message '{release.package.name} {release.version}'")
    if not options.dry_run:
        branch = make(release, root)
        print(f"Done. `{push_command(branch)}`, and a pull request; when the main branch has it, {last} there.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
