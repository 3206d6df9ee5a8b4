"""Text that stands elsewhere in the repository, as part of a page.

A page names it on a line of its own:

    <!-- include packages/rms_norm/README.md -->                      all of it but its title
    <!-- include packages/rms_norm/README.md but "Use" -->            without these sections
    <!-- include README.md section "Install" -->                      one section, with its heading
    <!-- include README.md text of "Install" -->                      the same without its heading

A section ends where the next heading of its level or a higher one begins; a line in bold type is one of the lowest level.
Links in the text lead to the page that shows the whole file, else to the repository, where tools/project.toml has an address
of it, else they name the file.
"""

from __future__ import annotations

import html
import os
import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from tools.metadata import read_project
from tools.workspace import ROOT

DIRECTIVE = re.compile(r'^<!-- include (?P<file>\S+?)(?: (?P<how>but|section|text of) (?P<names>"[^>]*"))? -->$', re.M)
# What a README says where it can link to nothing: its own page on an index has neither the file nor the site.
_PAGE = re.compile(
    r'the\s+page\s+"(?P<title>[^"]+)"\s+of\s+the\s+documentation,\s+'
    r"`tools/docs/pages/(?P<page>[^`]+)`\s+in\s+the\s+repository"
)
BOLD = 7  # the level of a line in bold type, below all headings
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>[^)\s]+)\)")


class DocsError(Exception):
    """A page asks for something that is not there."""


def headings(text: str) -> Iterator[tuple[int, str, int]]:
    """Level, title and line of every heading that is not in a block of code."""
    fenced = False
    for number, line in enumerate(text.splitlines()):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        found = re.match(r"(#+) (.*)", line)
        if found and not fenced:
            yield len(found[1]), found[2].strip(), number
        elif (bold := re.fullmatch(r"\*\*([^*]+)\*\*", line)) and not fenced:  # above a table
            yield BOLD, bold[1], number


def span(text: str, title: str, file: str) -> tuple[int, int]:
    """The first line of the section `title`, its heading, and the line behind its last."""
    found = list(headings(text))
    for position, (level, name, start) in enumerate(found):
        if name == title:
            ends = (line for other, _, line in found[position + 1 :] if other <= level)
            return start, next(ends, len(text.splitlines()))
    raise DocsError(f"{file} has no section {title!r}: it has {', '.join(repr(name) for _, name, _ in found)}.")


def take(file: str, how: str | None, names: list[str], root: Path = ROOT) -> str:
    """The text that a directive names."""
    try:
        text = (root / file).read_text()
    except OSError:
        raise DocsError(f"{file} is not there.") from None
    lines = text.splitlines()
    if how in ("section", "text of"):
        (title,) = names
        start, stop = span(text, title, file)
        return "\n".join(lines[start + (how == "text of") : stop]).strip()
    kept = set(range(len(lines)))
    for level, _, line in headings(text):
        if level == 1:
            kept.discard(line)
    for title in names:
        kept -= set(range(*span(text, title, file)))
    return "\n".join(line for number, line in enumerate(lines) if number in kept).strip()


def included(page: str) -> list[tuple[str, str | None, list[str]]]:
    """What a page includes: the file, how, and which sections."""
    found = DIRECTIVE.finditer(page)
    return [(each["file"], each["how"], re.findall(r'"([^"]+)"', each["names"] or "")) for each in found]


def homes(pages: Mapping[str, str]) -> dict[str, str]:
    """The page that shows a file of the repository, by the file's name and its folder's; of {name: text}."""
    found = {}
    for name, text in pages.items():
        for file, how, _ in included(text):
            if how in (None, "but"):
                found[file] = name
                if file.endswith("README.md") and "/" in file:
                    found[posixpath.dirname(file)] = name
    return found


def relink(text: str, source: str, page: str, found: Mapping[str, str]) -> str:
    """The text of the file `source` with its links as the page `page` needs them."""

    def follow(link: re.Match[str]) -> str:
        target, _, anchor = link["target"].partition("#")
        if re.match(r"https?:|mailto:", target) or not target:
            return link[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), target.removeprefix("repo:")))
        if target.startswith("repo:"):
            file = target.removeprefix("repo:")
        if file in found:
            return f"[{link['text']}]({_relative(found[file], page)}{'#' + anchor if anchor else ''})"
        if not (ROOT / file).exists():
            raise DocsError(f"{source} links to {target}, which is not there.")
        return to_repository(link["text"], file)

    def to_page(said: re.Match[str]) -> str:
        return f"[{said['title']}]({_relative(said['page'], page)})"

    blocks = re.split(r"(^ *```.*?^ *```)", text, flags=re.M | re.S)
    for number in range(0, len(blocks), 2):
        blocks[number] = _PAGE.sub(to_page, _LINK.sub(follow, blocks[number]))
    return "".join(blocks)


def _relative(target: str, page: str) -> str:
    return posixpath.relpath(target, posixpath.dirname(page) or ".")


def to_repository(text: str, file: str) -> str:
    """A link to a file of the repository; its name alone where the repository has no address."""
    address = read_project()["urls"].get("Repository")
    if address:
        return f"[{text}]({address}/blob/main/{file})"
    plain = text.strip("`")
    if plain == file:
        return f"`{file}`"
    return f'<span class="in-repository" title="{html.escape(file)} in the repository">{html.escape(plain)}</span>'


def expand(page: str, name: str, found: Mapping[str, str]) -> str:
    """A page with all that it includes."""

    def insert(directive: re.Match[str]) -> str:
        names = re.findall(r'"([^"]+)"', directive["names"] or "")
        return relink(take(directive["file"], directive["how"], names), directive["file"], name, found)

    own = re.split(r"(^<!-- include .*? -->$)", page, flags=re.M)
    done = []
    for part in own:
        directive = DIRECTIVE.match(part)
        if part.startswith("<!-- include") and not directive:
            raise DocsError(f"{name}: {part} is no directive; tools/docs/sections.py says how they are written.")
        done.append(insert(directive) if directive else _own_links(part, name, found))
    return "".join(done)


def _own_links(text: str, page: str, found: Mapping[str, str]) -> str:
    """Links of a page itself: those to `repo:FILE` are followed, others are MkDocs's."""

    def follow(link: re.Match[str]) -> str:
        return relink(link[0], page, page, found) if link["target"].startswith("repo:") else link[0]

    return _LINK.sub(follow, text)


def read_pages(folder: Path) -> dict[str, str]:
    """Every page, by its name from the folder of pages."""
    return {str(file.relative_to(folder)).replace(os.sep, "/"): file.read_text() for file in sorted(folder.rglob("*.md"))}
