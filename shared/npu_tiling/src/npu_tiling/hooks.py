"""Replacing functions of another package so that they can be put back."""

from __future__ import annotations

import sys
from typing import Any


class Hook:
    """Attributes of modules that are replaced together, and what they were before."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    def replace(self, holder: Any, name: str, value: Any) -> None:
        """Set an attribute of a module or class, once: a second call changes nothing."""
        if any(place is holder and known == name for place, known, _ in self._originals):
            return
        self._originals.append((holder, name, getattr(holder, name)))
        setattr(holder, name, value)

    def replace_everywhere(self, package: str, name: str, original: Any, value: Any) -> None:
        """The same in every loaded module of `package` that has `original` under that name."""
        for module_name, module in list(sys.modules.items()):
            of_package = module_name == package or module_name.startswith(f"{package}.")
            if of_package and vars(module).get(name) is original:
                self.replace(module, name, value)

    def undo(self) -> None:
        """Put back what was there."""
        while self._originals:
            holder, name, value = self._originals.pop()
            setattr(holder, name, value)
