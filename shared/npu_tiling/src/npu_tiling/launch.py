"""Launching a Triton kernel with little work on the host."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from . import installation
from .direct import DirectCall, always_specialised, observe, specialisation, unspecialised
from .errors import MissingTritonError

if TYPE_CHECKING:
    import torch

_MOST_MET = 4096  # tuples of numbers that a launcher remembers at once
_NEVER = object()
_ALIGNMENT = 16  # bytes: Triton compiles another kernel for pointers that are not aligned to this


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


class Launcher:
    """One `@triton.jit` kernel, launched on a 1-D grid.

    On CUDA the kernel that the JIT compiled is remembered, by what the JIT compiles another one for, and called directly
    from the third launch on (see direct.py), which saves the JIT's look-up and the launcher's own questions about every
    pointer. Elsewhere, for pointers that are not aligned to 16 bytes, where a profiler has hooked into launches, and where
    the installed Triton calls its kernels in another way, every launch goes through the JIT.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._plain = unspecialised(kernel)
        self._calls: dict[Hashable, Any] = {}  # what the JIT compiled, then a DirectCall; None: the JIT every time
        self._met: dict[Hashable, int] = {}
        triton = sys.modules["triton"]
        self._hooks: Any = getattr(getattr(triton, "knobs", None), "runtime", None)
        self._driver: Any = getattr(getattr(triton, "runtime", None), "driver", None)
        # Where PyTorch was built for ROCm, the JIT asks for the sizes of tensors too.
        self._possible = None not in (self._hooks, self._driver) and not sys.modules["torch"].version.hip

    def __call__(
        self,
        grid: int,
        tensors: Sequence[torch.Tensor | None],
        scalars: tuple[int | float, ...],
        constants: Mapping[str, Any],
        options: Mapping[str, Any],
        key: Hashable,
    ) -> None:
        """Launch the kernel.

        Args:
            grid: number of programs.
            tensors: the kernel's first parameters; the first is a tensor, whose device runs the kernel.
            scalars: the parameters that follow, numbers.
            constants: the parameters that follow those, `tl.constexpr`, by name.
            options: compiler options (`num_warps` on CUDA, `multibuffer` on Ascend).
            key: equal for two launches only if constants and options are.
        """
        device = tensors[0].device  # type: ignore[union-attr]
        kind, index = device.type, device.index
        if kind != "cpu":
            accelerator = getattr(sys.modules["torch"], kind)
            if index != accelerator.current_device():  # Triton launches on the current device, whatever the tensors'
                with accelerator.device(device):
                    self(grid, tensors, scalars, constants, options, key)
                return

        if kind != "cuda" or not self._may_call_directly():
            self._kernel[(grid,)](*tensors, *scalars, **constants, **options)
            return
        bits, direct = 0, True
        pointers: list[int | None] = []
        dtypes: list[torch.dtype | None] = []
        for tensor in tensors:
            if tensor is None:
                pointers.append(None)
                dtypes.append(None)
            else:
                pointer = tensor.data_ptr()
                pointers.append(pointer)
                dtypes.append(tensor.dtype)
                bits |= pointer
                direct &= tensor.is_cuda  # the JIT refuses others in words, a kernel would read through the address
        if not direct or bits % _ALIGNMENT:
            self._kernel[(grid,)](*tensors, *scalars, **constants, **options)
            return
        slot = (key, index, self._specialised(len(tensors), scalars), *dtypes)
        call = self._calls.get(slot, _NEVER)
        if type(call) is DirectCall:
            try:
                call(grid, self._driver.active.get_current_stream(index), pointers, scalars)
                return
            except TypeError:  # it takes no addresses, and nothing was launched
                call = self._calls[slot] = None

        def launch() -> Any:
            return self._kernel[(grid,)](*tensors, *scalars, **constants, **options)

        if call is None:
            launch()
        elif call is _NEVER:
            self._calls[slot] = launch()
        else:
            self._calls[slot] = observe(call, launch, grid, (*tensors, *scalars))

    def _specialised(self, first: int, scalars: tuple[Any, ...]) -> Hashable:
        """Equal for numbers, from parameter `first` on, that share a compiled kernel."""
        types = tuple(map(type, scalars))
        met = (types, scalars)  # with their types: 1, 1.0 and True are equal
        found = self._met.get(met)
        if found is None:
            if len(self._met) >= _MOST_MET:
                self._met.clear()
            plain = self._plain[first:] if self._plain else always_specialised(len(scalars))
            found = self._met[met] = _number(tuple(specialisation(scalars, plain)))
        return found

    def _may_call_directly(self) -> bool:
        if not self._possible:
            return False
        enter, leave = self._hooks.launch_enter_hook, self._hooks.launch_exit_hook
        return not (getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


class Tiled(Protocol):
    """What a package's tiling returns for one launch."""

    @property
    def constants(self) -> Mapping[str, Any]:
        """`tl.constexpr` parameters that follow from the tiling, by name."""

    @property
    def options(self) -> Mapping[str, Any]:
        """Compiler options."""


@dataclass(frozen=True, eq=False)
class Recipe:
    """Everything of a launch that its tensors' addresses do not change: made once for equal launches, by a cached function.

    Attributes:
        launch: the tiling.
        constants: all of the kernel's `tl.constexpr` parameters, by name.
        options: compiler options.
        key: equal for recipes whose constants and options are equal.
        modes: the constants that the tiling does not choose.
    """

    launch: Any
    constants: Mapping[str, Any]
    options: Mapping[str, Any]
    key: Hashable
    modes: Mapping[str, Any]

    @classmethod
    def of(cls, launch: Tiled, modes: Mapping[str, Any]) -> Recipe:
        """A launch with its modes."""
        constants, options = {**launch.constants, **modes}, launch.options
        # With their types: 1, 1.0 and True are equal.
        values = (*constants.values(), *options.values())
        key = _number((tuple(constants), tuple(options), values, tuple(map(type, values))))
        return cls(launch, constants, options, key, modes)

    def smaller(self, choose: Callable[[Any], Tiled | None]) -> Recipe | None:
        """The recipe of the next smaller launch, for `launch_with_fallback`; None at the end."""
        launch = choose(self.launch)
        return None if launch is None else Recipe.of(launch, self.modes)


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
        scalars: tuple[int | float, ...],
    ) -> None:
        """Launch `kernel` of `module`: tensors, then scalars, then the recipe's constants (see `Launcher`)."""
        launcher = self._launchers.get((module, kernel))
        if launcher is None:
            loaded = import_kernels(f"{self._package}.{module}", self._distribution)
            launcher = self._launchers[module, kernel] = Launcher(getattr(loaded, kernel))
        launcher(grid, tensors, scalars, recipe.constants, recipe.options, recipe.key)
