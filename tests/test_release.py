"""What a tag releases, in a repository of its own."""

from __future__ import annotations

import subprocess

import pytest

from tools import changelog, public_api
from tools.release_tag import released_by, require_merged
from tools.wheel_test import lowest
from tools.workspace import ROOT, read_packages

PROJECT = '[project]\nname = "npu-scale"\nversion = "0.2.0"\nrequires-python = ">=3.10"\ndependencies = [{}]\n'
FILES = {
    "packages/scale/pyproject.toml": PROJECT.format('"npu-tiling>=0.1,<0.3"'),
    "packages/scale/CHANGELOG.md": "# Changelog\n\n## 0.2.0\n\n- `new`.\n\n## 0.1.0\n\n- First release.\n",
    "tests/public_api/scale.txt": "0.1.0 old() -> int\n0.2.0 new() -> int\n",
}
TAG = "npu-scale-v0.2.0"


@pytest.fixture
def root(tmp_path):
    for path, text in FILES.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def test_a_tag_names_the_package_whose_files_say_so(root):
    assert released_by(TAG, root).key == "scale"
    for wrong in ("npu-scale-v0.3.0", "npu-other-v0.1.0", "v0.2.0"):
        with pytest.raises(ValueError, match=wrong):
            released_by(wrong, root)


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("packages/scale/CHANGELOG.md", "## 0.2.0", "## Unreleased\n\n- More.\n\n## 0.2.0", "starts with Unreleased"),
        ("packages/scale/pyproject.toml", "0.2.0", "0.3.0", "the version in packages/scale/pyproject.toml is 0.3.0"),
        ("tests/public_api/scale.txt", "0.2.0", "Unreleased", "hatch run api scale --release"),
    ],
)
def test_a_tag_is_refused_where_a_file_says_another_thing(root, file, old, new, said):
    (root / file).write_text((root / file).read_text().replace(old, new))
    with pytest.raises(ValueError, match=said):
        released_by(TAG, root)


def test_only_what_the_main_branch_has_is_released(root):
    def git(*arguments):
        subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True)

    def commit():
        git("-c", "user.name=A", "-c", "user.email=a@b", "commit", "--quiet", "--allow-empty", "--message", "x")

    git("init", "--quiet")
    commit()
    with pytest.raises(ValueError, match="git cannot compare with origin/main"):
        require_merged(root)
    git("update-ref", "refs/remotes/origin/main", "HEAD")
    require_merged(root)
    commit()
    with pytest.raises(ValueError, match="origin/main has not the commit"):
        require_merged(root)


def test_a_release_is_tested_with_the_lowest_core_that_it_allows(root):
    assert lowest(read_packages(root)["scale"]) == ["npu-tiling==0.1"]
    assert lowest(read_packages()["npu_tiling"]) == []
    assert all(lowest(package) for package in read_packages().values() if package.is_operator)


def test_a_release_gives_its_version_to_what_was_unreleased(tmp_path, monkeypatch):
    monkeypatch.setattr(public_api, "ROOT", tmp_path)
    before = public_api.read(ROOT / public_api.FOLDER / "rms_norm.txt")
    file = tmp_path / public_api.FOLDER / "rms_norm.txt"
    file.parent.mkdir(parents=True)
    file.write_text(public_api.text(before))
    assert public_api.main(["rms_norm", "--release"]) == 0
    after = public_api.read(file)
    assert changelog.UNRELEASED not in after.values() and [*after] == [line for line in before if "(removed)" not in line]


def test_notes_are_the_section_without_line_ends_inside_of_sentences():
    text = "# Log\n\n## 0.2.0\n\nA sentence\nof two lines.\n\n- An item,\n  and on.\n- Another.\n\n## 0.1.0\n\n- Old.\n"
    assert changelog.notes(text, "0.2.0") == "A sentence of two lines.\n\n- An item, and on.\n- Another.\n"
