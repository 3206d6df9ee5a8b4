"""A package's kernels by module and name: imported when they are needed, launched or listed."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Sequence
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from ..errors import MissingTritonError
from ..installation import triton as installation
from .launcher import Launcher
from .spec import LaunchSpec

if TYPE_CHECKING:
    import torch

    from .direct import DirectCall, Watchers


def import_kernels(module: str, package: str) -> ModuleType:
    """Import a module of device code, or say how to install what it needs.

    Args:
        module: full name of the module, which imports triton.
        package: the pip name of the package that it belongs to.

    Raises:
        MissingTritonError: no Triton is installed, or the one that is cannot be imported; the message has the commands.
    """
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


class Kernels:
    """A package's kernels, by module and name; each is imported when it is first launched.

    Attributes:
        package: its full name.
    """

    def __init__(self, package: str, distribution: str) -> None:
        """For the modules of `package` (a full name), installed as `distribution`."""
        self.package, self._distribution = package, distribution
        self._launchers: dict[tuple[str, str], Launcher] = {}

    def launch(
        self,
        module: str,
        kernel: str,
        spec: LaunchSpec,
        grid: int,
        tensors: Sequence[Any],
        scalars: tuple[int | float | None, ...],
    ) -> None:
        """Launch `kernel` of `module`: tensors, then scalars, then the spec's constants (see `Launcher.__call__`)."""
        launcher = self._launchers.get((module, kernel))
        if launcher is None:
            launcher = self._launchers[module, kernel] = Launcher(self._import(module, kernel))
        launcher(grid, tensors, scalars, spec.constants, spec.options, spec.key)

    def direct_call(
        self,
        module: str,
        kernel: str,
        spec: LaunchSpec,
        grid: int,
        device: torch.device,
        dtypes: Sequence[Any],
        scalars: tuple[int | float | None, ...],
    ) -> tuple[DirectCall, Watchers] | None:
        """How `launch` would call the kernel without Triton's JIT (see `Launcher.direct_call`)."""
        launcher = self._launchers.get((module, kernel))
        return None if launcher is None else launcher.direct_call(spec.key, grid, device, dtypes, scalars)

    def _import(self, module: str, kernel: str) -> Any:
        found = getattr(import_kernels(f"{self.package}.{module}", self._distribution), kernel)
        if isinstance(found, FunctionType):  # device/language.py found no Triton that can be imported
            import_kernels("triton", self._distribution)
        return found


@functools.cache
def kernels_of(module: str) -> tuple[Kernels, str]:
    """The kernels of the package that a module belongs to, and the module's name in it.

    A package of ours may be a part of another one, as in a kernel repository of the Hugging Face Hub.
    """
    parts = module.split(".")
    end = next((i for i, part in enumerate(parts) if part.startswith("npu_")), 0) + 1
    return _of_package(".".join(parts[:end])), ".".join(parts[end:])


@functools.cache
def _of_package(package: str) -> Kernels:
    return Kernels(package, package.rpartition(".")[2].replace("_", "-"))
