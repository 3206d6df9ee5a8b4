"""Launching a Triton kernel with little work on the host."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from .errors import MissingTritonError

if TYPE_CHECKING:
    import torch

# Releases whose compiled kernels were tried with the direct call below; others go through the JIT on every launch.
_DIRECT_CALL_RELEASES = ("3.6",)
_ALIGNMENT = 16  # bytes: Triton compiles another kernel for pointers that are not aligned to this


def import_kernels(module: str, package: str) -> ModuleType:
    """Import a module of device code, or say how to install what it needs.

    Args:
        module: full name of the module, which imports triton.
        package: the pip name of the package that it belongs to.

    Raises:
        MissingTritonError: no Triton is installed.
    """
    loaded = sys.modules.get(module)
    if loaded is not None:
        return loaded
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise MissingTritonError(
            f"{package} needs Triton to run on an accelerator: pip install '{package}[npu]' on Ascend, "
            f"pip install '{package}[cuda]' on CUDA (never both in one environment)."
        ) from None


class Launcher:
    """One `@triton.jit` kernel, launched on a 1-D grid.

    On CUDA the kernel that the JIT compiled is remembered and called directly the next time, which saves the JIT's own
    look-up. Elsewhere, and for pointers that are not aligned to 16 bytes, every launch goes through the JIT.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[Hashable, Any] = {}
        self._direct = sys.modules["triton"].__version__.rpartition(".")[0] in _DIRECT_CALL_RELEASES

    def __call__(
        self,
        grid: int,
        tensors: Sequence[torch.Tensor | None],
        scalars: Sequence[int | float],
        constants: Mapping[str, Any],
        options: Mapping[str, Any],
        key: Hashable,
    ) -> None:
        """Launch the kernel.

        Args:
            grid: number of programs.
            tensors: the kernel's first parameters; the first is a tensor, whose device runs the kernel.
            scalars: the parameters that follow, numbers.
            constants: the parameters that follow those, `tl.constexpr`, in the kernel's order.
            options: compiler options (`num_warps` on CUDA, `multibuffer` on Ascend).
            key: equal for two launches only if dtypes, scalars that the JIT specialises, constants and options are.
        """
        device = tensors[0].device  # type: ignore[union-attr]
        if device.type != "cpu":
            import torch

            accelerator = getattr(torch, device.type)
            if device.index != accelerator.current_device():  # Triton launches on the current device, whatever the tensors'
                with accelerator.device(device):
                    self(grid, tensors, scalars, constants, options, key)
                return
        bits = 0
        if device.type == "cuda" and self._direct:
            for tensor in tensors:
                if tensor is not None:
                    bits |= tensor.data_ptr()
        if device.type != "cuda" or not self._direct or bits % _ALIGNMENT:
            self._kernel[(grid,)](*tensors, *scalars, **constants, **options)
            return
        slot = (key, device.index)
        compiled = self._compiled.get(slot)
        if compiled is None:
            self._compiled[slot] = self._kernel[(grid,)](*tensors, *scalars, **constants, **options)
        else:
            compiled[(grid, 1, 1)](*tensors, *scalars, *constants.values())


class Tiled(Protocol):
    """What a package's tiling returns for one launch."""

    @property
    def constants(self) -> Mapping[str, Any]:
        """`tl.constexpr` parameters that follow from the tiling: the kernel's first ones, in its order."""

    @property
    def options(self) -> Mapping[str, Any]:
        """Compiler options."""


@dataclass(frozen=True, eq=False)
class Recipe:
    """Everything of a launch that its tensors' addresses do not change: made once for equal launches, by a cached function.

    Attributes:
        launch: the tiling.
        constants: all of the kernel's `tl.constexpr` parameters, in its order.
        options: compiler options.
        key: equal for recipes that need the same compiled kernel.
        modes: the constants that the tiling does not choose.
    """

    launch: Any
    constants: Mapping[str, Any]
    options: Mapping[str, Any]
    key: Hashable
    modes: Mapping[str, Any]

    @classmethod
    def of(cls, launch: Tiled, modes: Mapping[str, Any], kinds: Hashable) -> Recipe:
        """A launch with its modes.

        Args:
            kinds: whatever else the JIT compiles another kernel for: dtypes, strides of 1 or multiples of 16, numbers past
                32 bits.
        """
        constants, options = {**launch.constants, **modes}, launch.options
        return cls(launch, constants, options, (tuple(constants.values()), tuple(options.values()), kinds), modes)

    def smaller(self, choose: Callable[[Any], Tiled | None]) -> Recipe | None:
        """The recipe of the next smaller launch, for `launch_with_fallback`; None at the end."""
        launch = choose(self.launch)
        return None if launch is None else Recipe.of(launch, self.modes, self.key)


class Kernels:
    """A package's kernels, by module and name; each is imported when it is first launched."""

    def __init__(self, package: str, distribution: str) -> None:
        """For the modules of `package` (a full name), installed as `distribution`."""
        self._package, self._distribution = package, distribution
        self._launchers: dict[tuple[str, str], Launcher] = {}

    def launch(
        self,
        module: str,
        kernel: str,
        recipe: Recipe,
        grid: int,
        tensors: Sequence[torch.Tensor | None],
        scalars: Sequence[int | float],
    ) -> None:
        """Launch `kernel` of `module`: tensors, then scalars, then the recipe's constants (see `Launcher`)."""
        launcher = self._launchers.get((module, kernel))
        if launcher is None:
            loaded = import_kernels(f"{self._package}.{module}", self._distribution)
            launcher = self._launchers[module, kernel] = Launcher(getattr(loaded, kernel))
        launcher(grid, tensors, scalars, recipe.constants, recipe.options, recipe.key)
