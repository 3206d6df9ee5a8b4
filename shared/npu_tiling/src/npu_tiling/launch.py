"""Launching a Triton kernel with little work on the host."""

from __future__ import annotations

import importlib
import itertools
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

    On CUDA the kernel that the JIT compiled is remembered and called directly the next time, with addresses in the place of
    tensors, which saves the JIT's look-up and the launcher's own questions about every pointer. Elsewhere, for pointers that
    are not aligned to 16 bytes, and where a profiler has hooked into launches, every launch goes through the JIT.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[Hashable, Any] = {}
        triton = sys.modules["triton"]
        self._direct = triton.__version__.rpartition(".")[0] in _DIRECT_CALL_RELEASES
        if self._direct:
            self._hooks, self._driver = triton.knobs.runtime, triton.runtime.driver

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
        kind, index = device.type, device.index
        if kind != "cpu":
            accelerator = getattr(sys.modules["torch"], kind)
            if index != accelerator.current_device():  # Triton launches on the current device, whatever the tensors'
                with accelerator.device(device):
                    self(grid, tensors, scalars, constants, options, key)
                return
        direct = self._direct and kind == "cuda" and not self._hooked()
        pointers: list[int | None] = []
        if direct:
            bits = 0
            for tensor in tensors:
                if tensor is None:
                    pointers.append(None)
                    continue
                pointer = tensor.data_ptr()
                pointers.append(pointer)
                bits |= pointer
                direct &= tensor.is_cuda  # the JIT refuses others in words, a kernel would read through the address
            direct &= not bits % _ALIGNMENT
        if not direct:
            self._kernel[(grid,)](*tensors, *scalars, **constants, **options)
            return
        slot = (key, index)
        compiled = self._compiled.get(slot)
        if compiled is None:
            self._compiled[slot] = self._kernel[(grid,)](*tensors, *scalars, **constants, **options)
            return
        stream = self._driver.active.get_current_stream(index)
        launch = (grid, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None)
        compiled.run(*launch, *pointers, *scalars, *constants.values())

    def _hooked(self) -> bool:
        enter, leave = self._hooks.launch_enter_hook, self._hooks.launch_exit_hook
        return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


class Tiled(Protocol):
    """What a package's tiling returns for one launch."""

    @property
    def constants(self) -> Mapping[str, Any]:
        """`tl.constexpr` parameters that follow from the tiling: the kernel's first ones, in its order."""

    @property
    def options(self) -> Mapping[str, Any]:
        """Compiler options."""


_numbers = itertools.count()
_numbered: dict[Hashable, int] = {}


def _number(key: Hashable) -> int:
    """The same number for equal keys: hashed at once on every launch, where a nested tuple is hashed through."""
    return _numbered.setdefault(key, next(_numbers))


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
        key = _number((tuple(constants.values()), tuple(options.values()), kinds))
        return cls(launch, constants, options, key, modes)

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
