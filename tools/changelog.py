"""Changelogs in the form of Keep a Changelog: a section for each release, latest first, "## Unreleased" above them."""

from __future__ import annotations

import re

UNRELEASED = "Unreleased"


def sections(text: str) -> dict[str, str]:
    """What each section says, by its title, in the file's order."""
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)[1:]
    return {title.strip(): body.strip() for title, body in zip(parts[::2], parts[1::2], strict=True)}


def latest_release(text: str) -> str | None:
    """The version of the topmost section that is a release."""
    return next((title for title in sections(text) if title != UNRELEASED), None)


def release(text: str, version: str) -> str:
    """The changelog with what was unreleased under `version`, below what that section says already if there is one."""
    if version not in sections(text):
        return re.sub(rf"^## {UNRELEASED}\s*$", f"## {version}\n", text, count=1, flags=re.MULTILINE)
    found = re.search(rf"^## {UNRELEASED}\s*\n(.*?)(?=^## )", text, re.MULTILINE | re.DOTALL)
    if found is None:
        return text
    text = text[: found.start()] + text[found.end() :]
    said, added = sections(text)[version], found[1].strip()
    both_are_lists = said.rpartition("\n")[2].startswith(("- ", "  ")) and added.startswith("- ")
    return text.replace(said, f"{said}{chr(10) if both_are_lists else chr(10) * 2}{added}", 1).rstrip() + "\n"


def notes(text: str, version: str) -> str:
    """What a release says of itself; a paragraph or item is one line, because GitHub shows line ends as such."""
    return re.sub(r"(?<=\S)\n(?!\n|- )[ ]*", " ", sections(text)[version]) + "\n"
