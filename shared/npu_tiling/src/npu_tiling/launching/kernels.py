"""A package's kernels by name, and what a launch of one needs beside its tensors."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import MissingTritonError
from ..installation import triton as installation
from .launcher import Launcher

if TYPE_CHECKING:
    import torch


def import_kernels(module: str, package: str) -> ModuleType:
    """Import a module of device code, or say how to install what it needs.

    Args:
        module: full name of the module, which imports triton.
        package: the pip name of the package that it belongs to.

    Raises:
        MissingTritonError: no Triton is installed, or the one that is cannot be imported; the message has the commands.
    """
    loaded = sys.modules.get(module)
    if loaded is not None:
        return loaded
    try:
        return importlib.import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "triton":
            reason = installation.triton_problem() or installation.missing_wheel()
            raise MissingTritonError(
                f"{package} needs Triton to run on an accelerator: pip install '{package}[npu]' on Ascend, "
                f"pip install '{package}[cuda]' on CUDA (never both in one environment)." + (f" {reason}" if reason else "")
            ) from None
        if "triton" in sys.modules or (isinstance(error, ModuleNotFoundError) and not _is_of_triton(error.name)):
            raise
        problem = installation.triton_problem()
        if problem is None:
            raise
        raise MissingTritonError(f"{package} cannot import Triton. {problem}") from error


def _is_of_triton(module: str | None) -> bool:
    return (module or "").partition(".")[0] == "triton"


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


class Kernels:
    """A package's kernels, by module and name; each is imported when it is first launched."""

    def __init__(self, package: str, distribution: str) -> None:
        """For the modules of `package` (a full name), installed as `distribution`."""
        self._package, self._distribution = package, distribution
        self._launchers: dict[tuple[str, str], Launcher] = {}

    def function(self, module: str, kernel: str) -> Any:
        """A `@triton.jit` function, to be launched by Triton's JIT: with arguments that are no tensors or numbers."""
        return getattr(import_kernels(f"{self._package}.{module}", self._distribution), kernel)

    def launch(
        self,
        module: str,
        kernel: str,
        spec: LaunchSpec,
        grid: int,
        tensors: Sequence[torch.Tensor | None],
        scalars: tuple[int | float | None, ...],
    ) -> None:
        """Launch `kernel` of `module`: tensors, then scalars, then the spec's constants (see `Launcher`)."""
        launcher = self._launchers.get((module, kernel))
        if launcher is None:
            launcher = self._launchers[module, kernel] = Launcher(self.function(module, kernel))
        launcher(grid, tensors, scalars, spec.constants, spec.options, spec.key)
