"""The public API of every package is what its file says, and what changed since the last release is in the changelog."""

from __future__ import annotations

import importlib
import types

import pytest

from tools import changelog, public_api
from tools.changelog import UNRELEASED
from tools.workspace import ROOT, read_packages

PACKAGES = read_packages()


def complaints(before, now, log):
    """What is wrong with a file's lines `before`, for a package as it is `now` and its changelog."""
    found = [f"not in the file: {line}" for line in now if line not in before]
    gone = [line for line in before if line not in now and not line.endswith(public_api.REMOVED)]
    found += [f"not in the package: {line}" for line in gone]
    unreleased = changelog.sections(log).get(UNRELEASED, "")
    for line, since in before.items():
        name = public_api.name_of(line)
        if since == UNRELEASED and f"`{name}`" not in unreleased:
            found.append(f'changed since the last release and not in the changelog\'s "## {UNRELEASED}": `{name}`')
    return found


@pytest.mark.parametrize("package", PACKAGES.values(), ids=list(PACKAGES))
def test_public_api_is_written_down(package):
    file = ROOT / public_api.FOLDER / f"{package.key}.txt"
    log = (ROOT / package.folder / "CHANGELOG.md").read_text()
    found = complaints(public_api.read(file), public_api.describe(package), log)
    assert not found, "\n".join([f"`hatch run api {package.key}` writes {file.relative_to(ROOT)}.", *found])


@pytest.mark.parametrize("package", PACKAGES.values(), ids=list(PACKAGES))
def test_every_public_name_is_documented(package):
    module = importlib.import_module(package.module)
    for name in module.__all__:
        value = getattr(module, name)
        assert not callable(value) or (value.__doc__ or "").strip(), name


BEFORE = {"f(x: int) -> int": "0.1.0", "g() -> None": "0.1.0"}
CHANGED = ["f(x: int, y: int = 0) -> int", "h() -> None"]


def test_change_is_an_error_until_file_and_changelog_say_so():
    assert len(complaints(BEFORE, CHANGED, "")) == 4
    after = public_api.updated(BEFORE, CHANGED, "0.1.0")
    assert set(after.values()) == {UNRELEASED}
    assert len(complaints(after, CHANGED, "## Unreleased\n\n- `f` takes y.\n\n## 0.1.0\n\n- `g`, `h`.\n")) == 2
    log = "## Unreleased\n\n- `f` takes y; `h` replaces `g`.\n\n## 0.1.0\n"
    assert complaints(after, CHANGED, log) == []
    assert public_api.updated(after, CHANGED, "0.1.0") == after
    assert public_api.released(after, "0.2.0") == dict.fromkeys(CHANGED, "0.2.0")


def test_a_class_does_not_stand_for_its_methods():
    after = {"C.g() -> None": UNRELEASED}
    assert complaints(after, [*after], f"## {UNRELEASED}\n\n- `C.g`.\n") == []
    assert len(complaints(after, [*after], f"## {UNRELEASED}\n\n- `C`, `g`.\n")) == 1


def test_unchanged_lines_keep_their_release_and_a_first_file_has_the_version():
    assert public_api.updated(BEFORE, [*BEFORE, "k"], "0.3.0") == {**BEFORE, "k": UNRELEASED}
    assert public_api.updated({}, ["k"], "0.3.0") == {"k": "0.3.0"}


def test_description_shows_names_defaults_bases_and_methods(monkeypatch):
    namespace = {}
    source = '''
from __future__ import annotations
class A(dict):
    """A."""
    def method(self, *, mode: str = "x") -> A: ...
    def _private(self): ...
    @property
    def size(self) -> int: ...
    @classmethod
    def make(cls) -> A: ...
LIMIT = 3
'''
    exec(source, namespace)
    module = types.SimpleNamespace(__all__=["A", "LIMIT"], **{name: namespace[name] for name in ("A", "LIMIT")})
    monkeypatch.setattr(public_api.importlib, "import_module", lambda name: module)
    said = public_api.describe(PACKAGES["rms_norm"])
    assert said == [
        "A(...) is a dict",
        "A.make(cls) -> A",
        "A.method(self, *, mode: str = 'x') -> A",
        "A.size: property",
        "LIMIT: int",
    ]
