"""The documentation builds without a warning, has every public name, loads nothing from elsewhere, quotes real messages."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from functools import cache
from html.parser import HTMLParser
from types import SimpleNamespace

import griffe
import pytest
import yaml
from npu_offline.cli import _parser as offline_parser
from npu_tiling.command import main as explain_command

from tests.test_readmes import PROGRAMS
from tools.docs import hooks, reference, sections
from tools.workspace import ROOT, read_packages

FOLDER = ROOT / "tools" / "docs"
PAGES = sections.read_pages(FOLDER / "pages")
PACKAGES = read_packages()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as `hatch run docs:build` builds it."""
    script = tomllib.loads((ROOT / "hatch.toml").read_text())["envs"]["docs"]["scripts"]["build"]
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, *script.removesuffix(" {args}").split()[1:], "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class _Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.ids, self.loaded, self.links = set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        self.ids |= {named[key] for key in ("id", "name") if named.get(key)}
        if tag in ("script", "img", "iframe", "source") and named.get("src"):
            self.loaded.append(named["src"])
        if tag == "link" and named.get("rel") != "canonical":
            self.loaded.append(named["href"])
        if tag == "a" and named.get("href"):
            self.links.append(named["href"])


@pytest.fixture(scope="module")
def read(site):
    """Every page but the one for addresses that are not there, whose links are of an address that is not known."""
    files = sorted(site.rglob("*.html"))
    return {file.relative_to(site): _Page(file.read_text()) for file in files if file.name != "404.html"}


@pytest.mark.slow
@pytest.mark.parametrize("key", PACKAGES)
def test_every_public_name_is_in_the_reference(site, read, key):
    names = reference.public_names(key)
    (page,) = (parsed for file, parsed in read.items() if str(file) == f"api/{key}.html")
    assert names and set(names) <= page.ids
    module = __import__(PACKAGES[key].module)
    assert {f"{PACKAGES[key].module}.{name}" for name in module.__all__} <= set(names)


@pytest.mark.slow
def test_a_reference_says_a_type_once_and_has_public_names_alone(site, read):
    for key in PACKAGES:
        text = (site / "api" / f"{key}.html").read_text()
        assert not re.search(r", default:\s*<code>|<li class=\"doc-section-item field-body\">\s*<b><code>\w+,<", text)
        assert "<li class" in text
        assert not re.search(r"Bases: <code>(<[^>]*>)?_|MappingProxyType", text)
    ids = set().union(*(page.ids for file, page in read.items() if file.parts[0] == "api"))
    assert {"npu_rms_norm.explain", "npu_rms_norm.explain.explain"} <= ids
    assert not [name for name in ids if name.endswith(".NAMES")]


def test_every_public_name_has_words_of_its_own():
    sources = [ROOT / package.folder / "src" for package in PACKAGES.values()]
    for key, package in PACKAGES.items():
        module = griffe.load(package.module, search_paths=sources, resolve_aliases=True)
        for name in reference.public_names(key):
            one = module[name.removeprefix(f"{package.module}.")]
            assert one.has_docstring, name
            if one.is_class and "NamedTuple" in map(str, one.bases):  # its page has the docstring's list of fields alone
                fields = [key for key, member in one.members.items() if member.is_attribute]
                assert all(re.search(rf"\b{field}\b", one.docstring.value) for field in fields), (
                    f"{name}: list its fields under Attributes"
                )


@pytest.mark.parametrize("key", PACKAGES)
def test_a_reference_begins_with_the_main_function_and_lists_each_name_once(key):
    listed = re.findall(r"^::: (.*)$", reference.directives(key), re.M)
    assert sorted(listed) == sorted(reference.public_names(key))
    if PACKAGES[key].is_operator:
        assert listed[0] == f"{PACKAGES[key].module}.{key}"


def test_addresses_are_those_of_one_file(monkeypatch):
    config = SimpleNamespace(site_url="x", repo_url="x", repo_name="x")
    assert vars(hooks.on_config(config)) == {"site_url": "", "repo_url": None, "repo_name": ""}
    urls = {"Repository": "https://example.org/team/kernels", "Documentation": "https://example.org/docs/"}
    monkeypatch.setattr(hooks, "read_project", lambda: {"urls": urls})
    assert list(vars(hooks.on_config(config)).values()) == [urls["Documentation"], urls["Repository"], "kernels"]


@pytest.mark.slow
def test_every_page_is_in_the_site_and_links_to_what_is_there(site, read):
    assert {str(file.with_suffix(".md")) for file in read} == set(PAGES)
    for file, page in read.items():
        for link in page.links:
            target, _, anchor = link.partition("#")
            if re.match(r"https?:|mailto:", target):
                continue
            place = (site / file.parent / target).resolve().relative_to(site.resolve()) if target else file
            assert (site / place).exists(), (file, link)
            assert not anchor or place not in read or anchor in read[place].ids, (file, link)


@pytest.mark.slow
def test_a_page_loads_nothing_from_another_host(site, read):
    for file, page in read.items():
        assert page.loaded and not [source for source in page.loaded if re.match(r"(https?:)?//", source)], file
    styles = "".join(file.read_text() for file in site.rglob("*.css"))
    assert not re.findall(r"(?:url\(|@import )['\"]?(?:https?:)?//[^)]*", styles)


@pytest.mark.slow
def test_nothing_is_left_of_what_pages_are_made_from(site):
    for file in site.rglob("*.html"):
        text = file.read_text()
        assert not re.search(r"<!-- (include|api|charts|losses|install)\b|class=\"arithmatex\"|flowchart TD|\$\$", text), (
            file
        )
        words = re.sub(r"<(pre|code)\b.*?</\1>", "", text, flags=re.S)
        assert not re.search(r"\| ?-{3}|^\d\. |^- \w|\[[^\]]+\]\([^)]+\)", words, re.M), file  # tables, lists, links


def test_reference_reads_the_sources_of_every_package():
    config = yaml.safe_load((FOLDER / "mkdocs.yml").read_text())
    (handler,) = (plugin["mkdocstrings"]["handlers"]["python"] for plugin in config["plugins"] if "mkdocstrings" in plugin)
    assert {(FOLDER / path).resolve() for path in handler["paths"]} == {
        ROOT / package.folder / "src" for package in PACKAGES.values()
    }


def test_tests_build_with_what_the_site_is_built_with():
    environments = tomllib.loads((ROOT / "hatch.toml").read_text())["envs"]
    needed = set(environments["docs"]["dependencies"])
    assert needed <= set(environments["default"]["dependencies"])


@cache
def _messages():
    """The longest fixed part, and a pattern, of every text in the sources where that part tells it from others."""
    found = set()
    for file in ROOT.glob("*/*/src/**/*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            if all(isinstance(part, ast.FormattedValue | ast.Constant) for part in parts):
                fixed = [part.value if isinstance(part, ast.Constant) else None for part in parts]
                longest = max((part for part in fixed if isinstance(part, str)), key=len, default="")
                if len(longest) >= 8:
                    found.add((longest, "".join(".*" if part is None else re.escape(str(part)) for part in fixed)))
    return found


# Files with Python blocks that pages include, and the tests that run them; what is left is run by tests/test_readmes.py.
RUN_ELSEWHERE = {
    "shared/npu_offline/README.md": "shared/npu_offline/tests/test_readme.py",
    "shared/npu_bench/README.md": "shared/npu_bench/tests/test_readme.py",
    "shared/npu_tiling/README.md": "shared/npu_tiling/tests/test_readme.py",
    "shared/npu_offline/COMPILER_FAULTS.md": "shared/npu_offline/tests/test_compiler_faults.py",  # kernels, shown in part
}


def test_every_python_block_of_the_site_is_run():
    included = {file for text in PAGES.values() for file, _, _ in sections.included(text)}
    programs = {str(file.relative_to(ROOT)) for file in PROGRAMS}
    with_python = {file for file in included if "```python" in (ROOT / file).read_text()}
    assert with_python <= programs | set(RUN_ELSEWHERE)
    assert all((ROOT / test).exists() for test in RUN_ELSEWHERE.values())
    own = {name for name, text in PAGES.items() if "```python" in text}
    assert {f"tools/docs/pages/{name}" for name in own} <= programs


def _texts():
    """Pages and the files that they include."""
    files = {ROOT / file for text in PAGES.values() for file, _, _ in sections.included(text)}
    return sorted(files | set((FOLDER / "pages").rglob("*.md")))


def test_no_words_are_read_as_tags():
    """`<a, b>` outside of code would be missing from the page."""
    apart = r"^ *```.*?^ *```|`[^`]+`|\$\$.*?\$\$|<!--.*?-->"
    for file in _texts():
        assert not re.findall(r"<[A-Za-z]\S*", re.sub(apart, "", file.read_text(), flags=re.M | re.S)), file


def _shell_lines():
    """Lines of blocks without a language, of pages and of the files that they include, without comments."""
    for file in _texts():
        for block in re.findall(r"^ *```\n(.*?)^ *```", file.read_text(), re.M | re.S):
            yield from (re.sub(r"\s#.*", "", line).strip() for line in block.splitlines())


def test_commands_that_pages_show_are_there():
    seen = set()
    for line in _shell_lines():
        program, *rest = line.split() or [""]
        if program == "npu-offline":
            offline_parser().parse_known_args(shlex.split(line)[1:])  # exits where a command or an option's value is unknown
            seen.add("npu-offline " + rest[0])
        elif program == "python" and rest[:1] == ["-m"] and rest[1] != "pip":
            assert importlib.util.find_spec(rest[1]), line
            seen.add(f"python -m {rest[1]}")
        elif program == "npu-bench" and not rest[0].startswith("-"):
            known = ("host", "stages", "show", "compare", "export", *PACKAGES)
            assert rest[0] in known or (ROOT / rest[0]).exists(), line
            seen.add("npu-bench " + rest[0])
    assert {"npu-offline fetch", "npu-offline doctor", "npu-offline check", "python -m npu_tiling", "npu-bench host"} <= seen


EXPLAINED = re.findall(
    r"^```\npython -m (npu_\w+) (explain [^\n]*)\n```\n\n```text\n(.*?)^```", PAGES["start/slow.md"], re.M | re.S
)


@pytest.mark.parametrize(("package", "options", "shown"), EXPLAINED, ids=[options for _, options, _ in EXPLAINED])
def test_what_explain_prints_has_the_lines_that_the_page_shows(package, options, shown, capsys):
    """In this order; `...` stands for lines that are left out, and a line of a file may be another one."""
    explain_command(package, importlib.import_module(f"{package}.explain").explain, shlex.split(options))
    printed = iter(re.sub(r"(\.py):\d+", r"\1", capsys.readouterr().out).splitlines())
    for line in re.sub(r"(\.py):\d+", r"\1", shown).splitlines():
        assert line in ("", "...") or line in printed, f"{line!r}: tools/docs/pages/start/slow.md shows another output"


def test_every_operator_explains_a_slow_shape():
    assert {package for package, _, _ in EXPLAINED} == {
        package.module for package in PACKAGES.values() if package.is_operator
    }


QUOTED = re.findall(r"^```text\n(.*?)\n```", PAGES["troubleshooting.md"], re.M | re.S)


@pytest.mark.parametrize("message", QUOTED, ids=lambda message: message[:60])
def test_a_quoted_message_is_one_of_ours(message):
    """Whole, but for the error's class, and a second sentence that another part of the sources says."""
    if message.startswith("error: ub overflow"):  # the compiler's own; npu-tiling recognises it
        from npu_tiling.launch import refusal

        assert refusal(RuntimeError(message)) is not None
        return
    text = re.sub(r"^\w+(Error|Warning): ", "", message)
    assert any(re.fullmatch(pattern, text) for fixed, pattern in _messages() if fixed in text), message


def _cells(table):
    lines = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip("* ") for cell in cells] for cells in lines if "---" not in cells[0]]


def test_the_numbers_of_whole_models_are_those_of_their_record():
    _, device, _, peak = (ROOT / "tools/results/model.md").read_text().split("\n**")
    header, *milliseconds = _cells(device)
    columns = [
        header.index(name) for name in ("plain", "liger", "ours", "ours_and_ligers_rest", "ours_and_ligers_rest_in_256_mib")
    ]
    said = _cells(sections.take("README.md", "text of", ["In a whole model"]))[1:]
    for times, peaks, row, below in zip(milliseconds, _cells(peak)[1:], said[::2], said[1::2], strict=True):
        assert re.sub("[ _]", "", row[0].lower()) == times[0].replace("_", "") == peaks[0].replace("_", "")
        assert row[2:] == [times[column] for column in columns]
        assert below[2:] == [f"{float(peaks[column]) / 1024:.1f}" for column in columns]
