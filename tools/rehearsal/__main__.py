"""Rehearse releases, from `hatch run release` to an installed wheel: `hatch run rehearse`, for all packages or those named.

It clones what is committed here, and has a repository to push to and a package index on this machine. For one package after
another it runs `hatch run release PACKAGE first`, merges the branch that this makes, runs `hatch run release PACKAGE tag`,
pushes the tag, and plays every job of the release workflow. Last, pip installs what was published, by its name, and the
README's example runs. Nothing leaves the machine.

With --offline, what is not ours comes from the environment that runs this, and tests run without Ascend compilers. Otherwise
all tests of all wheels take an hour and more; --tests "-m 'not slow and not compilers and not nightly'" runs fewer.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import release, wheels
from ..workspace import CORE, ROOT, Package, of_others, read_packages
from .index import Index, PublishError, serve
from .workflow import Workflow, WorkflowError, call

MAIN = "main"
_GH = '#!/bin/sh\nprintf "%s\\n" "$@" >> "$REHEARSAL_SAID"\n'
_HATCH = "#!/bin/sh\nexec {python} -m tools.rehearsal.scripts {offline} $@\n"


@dataclass(frozen=True)
class Rehearsal:
    """What all releases of a rehearsal share.

    Attributes:
        clone: where releases are made.
        remote: where they are pushed to.
        index: where they are published.
        folder: for everything else.
        offline: without another index.
        tests: pytest's arguments, beside those that the workflow gives.
        environments: of the repository on GitHub, one for each release that was published.
    """

    clone: Path
    remote: Path
    index: Index
    folder: Path
    offline: bool
    tests: str
    environments: set[str]

    def release(self, package: Package) -> None:
        """One package, all the way; a RuntimeError where it stops."""
        tag = f"{package.name}-v{package.version}"
        branch = f"release-{tag}"
        if release.push_command(branch) in self.hatch_release(package, "first"):
            self.merge(branch)
        push = release.push_command(f"refs/tags/{tag}")
        assert push in self.hatch_release(package, release.TAG)
        call(push.split(), self.clone, {})
        run = Workflow(
            self.clone / ".github" / "workflows" / "release.yml",
            self.remote,
            tag,
            self.folder / "runs" / package.key,
            self.variables(),
            lambda files, environment: self.publish(package, files, environment),
            lambda line: print(line, flush=True),
        )
        run.run()
        self.try_published(package)

    def hatch_release(self, package: Package, part: str) -> str:
        """What `hatch run release` prints for a package."""
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            if release.main([package.key, part], self.clone):
                raise RuntimeError(f"{package.key}: hatch run release {package.key} {part} was refused")
        return said.getvalue()

    def merge(self, branch: str) -> None:
        """What a pull request does that is squashed: the main branch gets a commit that the branch has not."""
        call(release.push_command(branch).split(), self.clone, {})
        for command in (
            ["switch", "--quiet", MAIN],
            ["merge", "--quiet", "--squash", branch],
            ["commit", "--quiet", "--message", branch],
            ["push", "--quiet", "origin", MAIN],
        ):
            call(["git", *command], self.clone, {})

    def publish(self, package: Package, files: list[Path], environment: str) -> None:
        """What the publishing action does: the same check of the files; the environment must be the package's own."""
        if environment != f"release-{package.name}":
            raise PublishError(f"{package.name}: the job's environment is {environment!r}, must be release-{package.name}")
        if environment in self.environments:
            raise PublishError(f"{environment}: an index takes one pending publisher for one environment")
        self.environments.add(environment)
        call([sys.executable, "-m", "twine", "check", "--strict", *map(str, files)], self.folder, {})
        self.index.publish(files)

    def variables(self) -> dict[str, str]:
        """The environment of the workflow's commands: pip finds what was published, beside what it is configured for."""
        variables = {"PYTHONPATH": "", "REHEARSAL_SAID": str(self.folder / "gh.txt")}
        variables["HATCH_DATA_DIR"] = str(self.folder / "hatch")  # environments of clones, gone with them
        variables["PYTEST_ADDOPTS"] = self.tests
        variables["PATH"] = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        if self.offline:
            return {**variables, "PIP_FIND_LINKS": " ".join(self.index.pages()), "PIP_CONFIG_FILE": os.devnull}
        configured = subprocess.run(
            [sys.executable, "-m", "pip", "config", "get", "global.extra-index-url"], capture_output=True, text=True
        )
        others = os.environ.get("PIP_EXTRA_INDEX_URL") or configured.stdout
        return {**variables, "PIP_EXTRA_INDEX_URL": f"{others.strip()} {self.index.address}".strip()}

    def try_published(self, package: Package) -> None:
        """Install a package by its name, as users do, and run its README's example."""
        environment = wheels.Environment(self.folder / "users" / package.key)
        links = self.folder / "links" / package.key
        links.parent.mkdir(exist_ok=True)
        environment.show(of_others(package.requires, read_packages(self.clone).values()), links)
        environment.install(f"{package.name}=={package.version}", find=self.index.pages())
        runs = package.is_operator or package.name == CORE  # the examples of the others need compilers or a benchmark
        example = "\n".join(wheels.readme_blocks(package, self.clone)) if runs else ""
        environment.run(f"import {package.module}\n{example}")
        print(f"{package.name} {package.version}: published, installed by its name, and its example runs", flush=True)


def prepare(folder: Path, index: Index, *, offline: bool, tests: str = "") -> Rehearsal:
    """A clone, a remote, and commands that stand in for those that would reach others."""
    remote, clone = folder / "remote.git", folder / "clone"
    call(["git", "clone", "--quiet", "--bare", str(ROOT), str(remote)], folder, {})
    here = release.git(ROOT, "rev-parse", "HEAD").strip()
    call(["git", "update-ref", f"refs/heads/{MAIN}", here], remote, {})  # whatever is checked out here
    call(["git", "symbolic-ref", "HEAD", f"refs/heads/{MAIN}"], remote, {})
    call(["git", "clone", "--quiet", str(remote), str(clone)], folder, {})
    for tag in release.git(clone, "tag").split():  # every release is a first one here
        call(["git", "tag", "--delete", tag], clone, {})
        call(["git", "push", "--quiet", "origin", "--delete", tag], clone, {})
    for setting in (["user.name", "rehearsal"], ["user.email", "rehearsal@localhost"]):
        call(["git", "config", *setting], clone, {})
    programs = {"gh": _GH}
    if offline:
        programs["hatch"] = _HATCH.format(python=sys.executable, offline="--offline")
    (folder / "bin").mkdir()
    (folder / "users").mkdir()
    for name, text in programs.items():
        program = folder / "bin" / name
        program.write_text(text)
        program.chmod(0o755)
    return Rehearsal(clone, remote, index, folder, offline, tests, set())


def in_order(packages: dict[str, Package]) -> list[Package]:
    """Each package after those of ours that it, or its tests, depend on."""
    names = {package.name for package in packages.values()}
    ordered: list[Package] = []
    while len(ordered) < len(packages):
        done = {package.name for package in ordered}
        ordered += [
            package
            for package in packages.values()
            if package not in ordered and {needed.name for needed in (*package.requires, *package.tests)} & names <= done
        ]
    return ordered


def main(arguments: Sequence[str] | None = None) -> int:
    packages = read_packages()
    parser = argparse.ArgumentParser(prog="rehearse", description=__doc__)
    parser.add_argument("package", nargs="*", help="default: every package")
    parser.add_argument("--offline", action="store_true", help="no other index, and no Ascend compilers")
    parser.add_argument("--tests", default="", metavar="ARGUMENTS", help="of pytest, which select some of a wheel's tests")
    options = parser.parse_args(arguments)
    if unknown := set(options.package) - set(packages):
        parser.error(f"{', '.join(unknown)}: must be one of {', '.join(packages)}")
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with serve(folder / "index") as index:
            rehearsal = prepare(folder, index, offline=options.offline, tests=options.tests)
            chosen = [package for package in in_order(packages) if not options.package or package.key in options.package]
            try:
                for package in chosen:
                    rehearsal.release(package)
            except (RuntimeError, PublishError, WorkflowError, subprocess.CalledProcessError) as error:
                print(f"The rehearsal stops: {error}", file=sys.stderr)
                return 1
    print(f"{len(chosen)} packages released, published and installed in {time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
