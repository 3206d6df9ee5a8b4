"""Launching a Triton kernel with little work on the host."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Hashable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

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
