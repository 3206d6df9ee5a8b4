"""What a launch needs beside its tensors, made once for equal launches."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

_numbers = itertools.count()
_numbered: dict[Hashable, int] = {}


def _number(key: Hashable) -> int:
    """The same number for equal keys: hashed at once on every launch, where a nested tuple is hashed through."""
    return _numbered.setdefault(key, next(_numbers))


class Tiled(Protocol):
    """What a package's tiling returns for one launch."""

    @property
    def constants(self) -> Mapping[str, Any]:
        """`tl.constexpr` parameters that follow from the tiling, by name."""

    @property
    def options(self) -> Mapping[str, Any]:
        """Compiler options."""


@dataclass(frozen=True, eq=False)
class LaunchSpec:
    """Everything of a launch that its tensors' addresses do not change: made once for equal launches, by a cached function.

    Attributes:
        launch: the tiling.
        constants: all of the kernel's `tl.constexpr` parameters, by name.
        options: compiler options.
        key: equal for specs whose constants and options are equal.
        flags: the constants that the tiling does not choose.
    """

    launch: Any
    constants: Mapping[str, Any]
    options: Mapping[str, Any]
    key: Hashable
    flags: Mapping[str, Any]

    @classmethod
    def of(cls, launch: Tiled, flags: Mapping[str, Any]) -> LaunchSpec:
        """A launch with its flags."""
        constants, options = {**launch.constants, **flags}, launch.options
        # With their types: 1, 1.0 and True are equal.
        values = (*constants.values(), *options.values())
        key = _number((tuple(constants), tuple(options), values, tuple(map(type, values))))
        return cls(launch, constants, options, key, flags)
