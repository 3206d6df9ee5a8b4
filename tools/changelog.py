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
    """The changelog with what was unreleased under `version`."""
    return re.sub(rf"^## {UNRELEASED}\s*$", f"## {version}\n", text, count=1, flags=re.MULTILINE)
