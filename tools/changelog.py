"""Changelogs in the form of Keep a Changelog: a section for each release, latest first, "## Unreleased" above them."""

from __future__ import annotations

import re

UNRELEASED = "Unreleased"


def sections(text: str) -> dict[str, str]:
    """What each section says, by its title, in the file's order."""
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)[1:]
    return {title.strip(): body.strip() for title, body in zip(parts[::2], parts[1::2], strict=True)}


def notes(text: str, version: str) -> str:
    """What a release says of itself; a paragraph or item is one line, because GitHub shows line ends as such."""
    return re.sub(r"(?<=\S)\n(?!\n|- )[ ]*", " ", sections(text)[version]) + "\n"
