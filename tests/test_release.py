"""Releases of made-up packages in a repository of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import changelog, release, release_tag
from tools.release import bump, git

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "0.1.0"
requires-python = ">=3.10"
readme = "README.md"
dependencies = [{dependencies}]

[tool.hatch.build.targets.wheel]
packages = ["src/{module}"]
"""


class Repository:
    """A core with one function, `old`, and an operator that uses it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.add_package("shared/npu_tiling", "npu-tiling", "", "def old(): return 1\n", "from npu_tiling import old")
        self.add_package(
            "packages/scale", "npu-scale", '"npu-tiling>=0.1,<0.2"', "from npu_tiling import old\n", "import npu_scale"
        )
        origin = root.parent / f"{root.name}.git"
        for command in (
            ["init", "--quiet", "--initial-branch", "main"],
            ["init", "--quiet", "--bare", str(origin)],
            ["remote", "add", "origin", str(origin)],
            ["config", "user.name", "A"],
            ["config", "user.email", "a@b"],
        ):
            git(root, *command)
        self.commit("Start")

    def add_package(self, folder, name, dependencies, code, example):
        module = name.replace("-", "_")
        self.write(f"{folder}/pyproject.toml", PROJECT.format(name=name, module=module, dependencies=dependencies))
        self.write(f"{folder}/src/{module}/__init__.py", code)
        self.write(f"{folder}/README.md", f"```python\n{example}\n```\n")
        self.write(f"{folder}/CHANGELOG.md", "# Changelog\n\n## 0.1.0\n\n- First release.\n")
        self.write(f"tests/public_api/{folder.split('/')[1]}.txt", "0.1.0 old() -> int\n")

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def change(self, path, old, new):
        text = (self.root / path).read_text()
        assert old in text
        self.write(path, text.replace(old, new))

    def note(self, folder, what):
        self.change(f"{folder}/CHANGELOG.md", "## 0.1.0", f"## Unreleased\n\n- {what}\n\n## 0.1.0")

    def commit(self, message):
        git(self.root, "add", "--all")
        git(self.root, "commit", "--quiet", "--message", message)
        git(self.root, "push", "--quiet", "origin", "main")

    def release(self, *arguments):
        return release.main(arguments, self.root)

    def merge(self, branch):
        """As a pull request that is squashed."""
        git(self.root, "switch", "--quiet", "main")
        git(self.root, "merge", "--quiet", "--squash", branch)
        self.commit(f"Merge {branch}")

    def release_and_tag(self, key, part):
        """0 where both commands do it, and what lies between them."""
        if self.release(key, part):
            return 1
        if git(self.root, "branch", "--show-current") != "main\n":
            self.merge(git(self.root, "branch", "--show-current").strip())
        return self.release(key, "tag")

    def state(self):
        return git(self.root, "log", "--format=%s"), git(self.root, "tag"), git(self.root, "status", "--porcelain")


@pytest.fixture
def repository(tmp_path):
    return Repository(tmp_path)


@pytest.mark.slow
def test_release_bumps_moves_the_changelog_and_commits_then_tags_what_was_merged(repository, capsys):
    assert repository.release_and_tag("npu_tiling", "first") == 0
    assert repository.release_and_tag("scale", "first") == 0
    repository.note("packages/scale", "`new` is new.")
    api = "0.1.0 old() -> int\nUnreleased new() -> int\nUnreleased gone (removed)\n"
    repository.write("tests/public_api/scale.txt", api)
    repository.commit("Something new")
    before = repository.state()
    assert repository.release("scale", "minor", "--dry-run") == 0
    assert repository.state() == before
    said = capsys.readouterr().out
    for line in ('+version = "0.2.0"', "+## 0.2.0", "+0.2.0 new() -> int", "git commit --message 'npu-scale 0.2.0'"):
        assert line in said
    assert "imports and runs its example with npu-tiling 0.1.0, from the tag npu-tiling-v0.1.0" in said

    assert repository.release("scale", "minor") == 0
    log, tags, status = repository.state()
    assert (log.splitlines()[0], tags) == ("npu-scale 0.2.0", before[1])
    assert "git push origin release-npu-scale-v0.2.0" in capsys.readouterr().out
    assert repository.release("scale", "tag") == 1
    assert "origin/main has not the commit that is checked out" in capsys.readouterr().err
    repository.merge("release-npu-scale-v0.2.0")
    assert repository.release("scale", "tag", "--dry-run") == 0
    assert repository.state()[1] == before[1]
    capsys.readouterr()
    assert repository.release("scale", "tag") == 0
    assert "git push origin refs/tags/npu-scale-v0.2.0" in capsys.readouterr().out
    log, tags, status = repository.state()
    assert tags.split() == ["npu-scale-v0.1.0", "npu-scale-v0.2.0", "npu-tiling-v0.1.0"]
    assert status == ""
    changes = (repository.root / "packages/scale/CHANGELOG.md").read_text()
    assert changes == "# Changelog\n\n## 0.2.0\n\n- `new` is new.\n\n## 0.1.0\n\n- First release.\n"
    assert (repository.root / "tests/public_api/scale.txt").read_text() == "0.1.0 old() -> int\n0.2.0 new() -> int\n"
    assert release_tag.released_by("npu-scale-v0.2.0", repository.root).key == "scale"
    for wrong in ("npu-scale-v0.3.0", "npu-other-v0.1.0", "v0.2.0"):
        with pytest.raises(ValueError, match=wrong):
            release_tag.released_by(wrong, repository.root)
    repository.change("packages/scale/CHANGELOG.md", "## 0.2.0", "## Unreleased\n\n- More.\n\n## 0.2.0")
    with pytest.raises(ValueError, match="starts with Unreleased"):
        release_tag.released_by("npu-scale-v0.2.0", repository.root)


@pytest.mark.slow
def test_package_that_needs_more_than_its_lowest_core_is_refused(repository, capsys):
    """The core in the working tree has what the package imports; the release that the package allows has not."""
    repository.release_and_tag("npu_tiling", "first")
    repository.change("shared/npu_tiling/src/npu_tiling/__init__.py", "def old", "def new(): return 2\n\ndef old")
    repository.change("packages/scale/src/npu_scale/__init__.py", "import old", "import new, old")
    repository.note("packages/scale", "Uses `new`.")
    repository.note("shared/npu_tiling", "`new`.")
    repository.commit("Use something new of the core")
    before = repository.state()
    assert repository.release("scale", "patch") == 1
    assert "cannot import name 'new'" in capsys.readouterr().err
    assert repository.state() == before

    assert repository.release_and_tag("npu_tiling", "patch") == 0
    repository.change("packages/scale/pyproject.toml", "npu-tiling>=0.1,", "npu-tiling>=0.1.1,")
    repository.commit("Ask for the core that has it")
    assert repository.release_and_tag("scale", "patch") == 0
    assert "npu-scale-v0.1.1" in repository.state()[1]


@pytest.mark.slow
def test_lowest_core_without_a_tag_must_be_the_working_trees(repository, capsys):
    assert repository.release("scale", "first", "--dry-run") == 0
    assert "npu-tiling 0.1.0, from the working tree" in capsys.readouterr().out
    repository.change("packages/scale/pyproject.toml", "npu-tiling>=0.1,", "npu-tiling>=0.0.9,")
    repository.commit("Allow a core that nobody has")
    assert repository.release("scale", "first") == 1
    assert "no tag npu-tiling-v0.0.9" in capsys.readouterr().err


@pytest.mark.slow
def test_development_package_imports_with_what_its_tests_need(repository, capsys):
    """A plugin of pytest imports pytest, and an example in its README is part of a program."""
    example = "plugin(kernel)  # nobody has defined these"
    repository.add_package("shared/tool", "npu-tool", '"npu-tiling>=0.1,<0.2"', "", example)
    repository.write("shared/tool/src/npu_tool/plugin.py", "import npu_tiling, pytest\n")
    project = repository.root / "shared/tool/pyproject.toml"
    project.write_text(project.read_text() + '\n[dependency-groups]\ntest = ["pytest>=8", "npu-scale"]\n')
    repository.commit("A tool")
    assert repository.release("tool", "first", "--dry-run") == 0
    assert "tool imports with npu-tiling 0.1.0" in capsys.readouterr().out


def test_breaking_core_names_the_packages_that_must_move(repository, capsys):
    repository.note("shared/npu_tiling", "`old` is gone.")
    repository.commit("Break")
    assert repository.release("npu_tiling", "patch", "--dry-run") == 0
    assert "raise its bounds" not in capsys.readouterr().out
    assert repository.release("npu_tiling", "minor", "--dry-run") == 0
    assert "scale does not allow npu-tiling 0.2.0: raise its bounds, then release it." in capsys.readouterr().out


def test_refusals(repository, capsys):
    def refused(*arguments):
        assert repository.release(*arguments) == 1
        return capsys.readouterr().err

    assert 'nothing under "## Unreleased"' in refused("npu_tiling", "patch")
    repository.change("shared/npu_tiling/CHANGELOG.md", "## 0.1.0", "## Unreleased\n\n## 0.1.0")
    assert "The working tree has changes" in refused("npu_tiling", "patch")
    repository.commit("An empty section")
    assert 'nothing under "## Unreleased"' in refused("npu_tiling", "patch")
    repository.change("shared/npu_tiling/CHANGELOG.md", "## Unreleased\n\n", "## Unreleased\n\n- A fix.\n\n")
    repository.commit("A full section")
    git(repository.root, "tag", "npu-tiling-v0.1.1")
    assert "npu-tiling has been released: npu-tiling-v0.1.1" in refused("npu_tiling", "first")
    assert "The tag npu-tiling-v0.1.1 exists" in refused("npu_tiling", "patch")
    repository.change("shared/npu_tiling/pyproject.toml", 'version = "0.1.0"', 'version = "0.1.5"')
    repository.commit("A version that no section has")
    assert "its latest release is not 0.1.5" in refused("npu_tiling", "patch")


def test_first_release_takes_in_what_is_unreleased(repository, capsys):
    """Changes are noted under "Unreleased" from the first day on, before there is any release."""
    repository.note("shared/npu_tiling", "`new` is new,\n  and long.")
    repository.write("tests/public_api/npu_tiling.txt", "0.1.0 old() -> int\nUnreleased new() -> int\n")
    repository.commit("Something new")
    assert repository.release_and_tag("npu_tiling", "first") == 0
    assert "git push origin refs/tags/npu-tiling-v0.1.0" in capsys.readouterr().out
    changes = (repository.root / "shared/npu_tiling/CHANGELOG.md").read_text()
    assert changes == "# Changelog\n\n## 0.1.0\n\n- First release.\n- `new` is new,\n  and long.\n"
    api = (repository.root / "tests/public_api/npu_tiling.txt").read_text()
    assert sorted(api.splitlines()) == ["0.1.0 new() -> int", "0.1.0 old() -> int"]
    assert release_tag.released_by("npu-tiling-v0.1.0", repository.root).key == "npu_tiling"
    assert repository.state()[2] == ""


def test_notes_are_the_section_without_line_ends_inside_of_sentences():
    text = "# Log\n\n## 0.2.0\n\nA sentence\nof two lines.\n\n- An item,\n  and on.\n- Another.\n\n## 0.1.0\n\n- Old.\n"
    assert changelog.notes(text, "0.2.0") == "A sentence of two lines.\n\n- An item, and on.\n- Another.\n"


@pytest.mark.parametrize(
    ("said", "added", "expected"),
    [
        ("- One.", "- Two.", "- One.\n- Two."),
        ("First release.", "- Two.", "First release.\n\n- Two."),
        ("- One.", "Two.", "- One.\n\nTwo."),
    ],
)
def test_sections_are_joined_as_lists_or_as_paragraphs(said, added, expected):
    text = f"# Log\n\n## Unreleased\n\n{added}\n\n## 0.1.0\n\n{said}\n"
    assert changelog.release(text, "0.1.0") == f"# Log\n\n## 0.1.0\n\n{expected}\n"


def test_tag_is_refused_where_it_would_not_say_what_is_there(repository, capsys):
    def refused():
        assert repository.release("npu_tiling", "tag") == 1
        assert repository.state()[1] == tags
        return capsys.readouterr().err

    tags = ""
    repository.note("shared/npu_tiling", "A fix.")
    assert "The working tree has changes" in refused()
    repository.commit("A fix")
    assert "CHANGELOG.md starts with Unreleased" in refused()
    assert repository.release_and_tag("npu_tiling", "patch") == 0
    tags = "npu-tiling-v0.1.1\n"
    assert "The tag npu-tiling-v0.1.1 exists" in refused()
    git(repository.root, "remote", "remove", "origin")
    repository.change("shared/npu_tiling/pyproject.toml", "0.1.1", "0.1.2")
    repository.change("shared/npu_tiling/CHANGELOG.md", "## 0.1.1", "## 0.1.2\n\n- More.\n\n## 0.1.1")
    git(repository.root, "commit", "--quiet", "--all", "--message", "By hand")
    assert "git cannot compare with origin/main" in refused()


@pytest.mark.parametrize(("part", "expected"), [("patch", "0.3.5"), ("minor", "0.4.0"), ("major", "1.0.0")])
def test_bump(part, expected):
    assert bump("0.3.4", part) == expected
