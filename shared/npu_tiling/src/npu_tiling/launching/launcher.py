"""One compiled kernel, launched with little work on the host."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import methodcaller, or_
from typing import TYPE_CHECKING, Any

from .direct import DirectCall, Watchers, always_specialised, observe, specialisation, unspecialised

if TYPE_CHECKING:
    import torch

_NEVER = object()
_ALIGNMENT = 16  # bytes: Triton compiles another kernel for pointers that are not aligned to this
_MOST_PROGRAMS = 65535  # triton-ascend refuses more


class Launcher:
    """One `@triton.jit` kernel, launched on a 1-D grid.

    The compiled kernel is kept, under what the JIT specialises kernels on, and called directly from the third launch on (see
    direct.py), which saves the JIT's look-up. A descriptor is passed on as it is, and Triton's launcher makes a tensor map.
    On CPU tensors, for pointers that are not aligned to 16 bytes, where a profiler has hooked into Triton's launches, and
    where the installed Triton calls its kernels in another way, every launch goes through the JIT.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._plain = unspecialised(kernel)
        self._calls: dict[Hashable, Any] = {}  # what the JIT compiled, then a DirectCall; None: the JIT every time
        self._places: dict[torch.device, tuple[str, int, Callable[[], int] | None]] = {}
        triton = sys.modules["triton"]
        self._watchers = Watchers(triton, kernel)
        self._driver: Any = getattr(getattr(triton, "runtime", None), "driver", None)
        self._descriptor = descriptor_type()
        # Where PyTorch was built for ROCm, the JIT asks for the sizes of tensors too.
        self._possible = self._watchers.known and self._driver is not None and not sys.modules["torch"].version.hip

    def __call__(
        self,
        grid: int,
        tensors: Sequence[Any],
        scalars: tuple[int | float | None, ...],
        constants: Mapping[str, Any],
        options: Mapping[str, Any],
        key: Hashable,
    ) -> None:
        """Launch the kernel.

        Args:
            grid: number of programs.
            tensors: the kernel's first parameters, None where there is none, on CUDA also tuples of tensors and Triton's
                descriptors; the first is a tensor, whose device runs the kernel.
            scalars: the parameters that follow, numbers; None is one that the kernel asks for, as of tensors.
            constants: the parameters that follow those, `tl.constexpr`, by name.
            options: compiler options (`num_warps` on CUDA, `multibuffer` on Ascend).
            key: equal for two launches only if constants and options are.
        """
        device = tensors[0].device
        place = self._places.get(device)
        if place is None:
            place = self._places[device] = (device.type, device.index, current_device(device.type))
        kind, index, current = place
        if current is not None and index != current():  # Triton launches on the current device, whatever the tensors'
            with getattr(sys.modules["torch"], kind).device(device):
                self(grid, tensors, scalars, constants, options, key)
            return

        def launch_by_jit() -> Any:
            return self._kernel[(grid,)](*tensors, *scalars, **constants, **options)

        if kind == "cpu" or not self._possible or self._watchers or (kind == "npu" and grid > _MOST_PROGRAMS):
            launch_by_jit()
            return
        on_cuda = kind == "cuda"
        pointers, dtypes = self._pointers_on_cuda(tensors) if on_cuda else _pointers_on_npu(tensors)
        if dtypes is None:
            launch_by_jit()
            return
        slot = self._slot(key, index, scalars, dtypes)
        call = self._calls.get(slot, _NEVER)
        if type(call) is DirectCall:
            try:
                call.launch(index, grid, pointers, scalars)
            except TypeError:  # it takes no addresses, and nothing was launched
                self._calls[slot] = None
                launch_by_jit()
                return
        elif call is None:
            launch_by_jit()
        elif call is _NEVER:
            self._calls[slot] = launch_by_jit()
        else:
            arguments = (*tensors, *scalars)
            self._calls[slot] = observe(call, launch_by_jit, grid, arguments, self._streams(kind), index, on_cuda)

    def direct_call(
        self, key: Hashable, grid: int, device: torch.device, dtypes: Sequence[Any], scalars: tuple[Any, ...]
    ) -> tuple[DirectCall, Watchers] | None:
        """How a launch of aligned tensors of these dtypes is called without the JIT; None: through the JIT."""
        if device.type == "cpu" or not self._possible or (device.type == "npu" and grid > _MOST_PROGRAMS):
            return None
        call = self._calls.get(self._slot(key, device.index, scalars, dtypes))
        return (call, self._watchers) if type(call) is DirectCall else None

    def _pointers_on_cuda(self, tensors: Sequence[Any]) -> tuple[list[Any], list[Any] | None]:
        """Addresses and dtypes, each a tuple for a tuple; no dtypes where one is not aligned, or not on a GPU."""
        bits, direct = 0, True
        pointers: list[Any] = []
        dtypes: list[Any] = []
        for tensor in tensors:
            if tensor is None:
                pointers.append(None)
                dtypes.append(None)
            elif type(tensor) is tuple:
                addresses = [each.data_ptr() for each in tensor]
                pointers.append(tuple(addresses))
                dtypes.append(tuple([each.dtype for each in tensor]))
                bits = functools.reduce(or_, addresses, bits)
                direct &= all(each.is_cuda for each in tensor)
            elif type(tensor) is self._descriptor:
                pointers.append(tensor)
                dtypes.append((tensor.base.dtype, *tensor.block_shape))
                bits |= tensor.base.data_ptr()
                direct &= tensor.base.is_cuda
            else:
                pointer = tensor.data_ptr()
                pointers.append(pointer)
                dtypes.append(tensor.dtype)
                bits |= pointer
                direct &= tensor.is_cuda  # the JIT refuses others in words, a kernel would read through the address
        return pointers, None if not direct or bits % _ALIGNMENT else dtypes

    def _slot(self, key: Hashable, index: int, scalars: tuple[Any, ...], dtypes: Sequence[Any]) -> Hashable:
        """Equal for launches that share a compiled kernel."""
        plain = self._plain[len(dtypes) :] if self._plain else always_specialised(len(scalars))
        return key, index, tuple(specialisation(scalars, plain)), *dtypes

    def _streams(self, kind: str) -> list[Callable[[int], Any]]:
        """Who may know the current stream: first torch_npu, of which triton-ascend's driver asks it more slowly."""
        of_torch = _of_torch_npu("_npu_getCurrentRawStream") if kind == "npu" else None
        return [*filter(None, [of_torch]), self._driver.active.get_current_stream]


@functools.cache
def descriptor_type() -> Any:
    """Triton's class of descriptors for TMA that the host makes; None where the installed Triton has none."""
    try:
        return importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor
    except ImportError:
        return None


def _pointers_on_npu(tensors: Sequence[Any]) -> tuple[Sequence[Any], list[Any] | None]:
    """The tensors, since triton-ascend's launcher asks them for their sizes while CANN profiles; dtypes as on CUDA."""
    present = [tensor for tensor in tensors if tensor is not None]
    bits = functools.reduce(or_, map(methodcaller("data_ptr"), present), 0)
    return tensors, None if bits % _ALIGNMENT else [None if tensor is None else tensor.dtype for tensor in tensors]


def current_device(kind: str) -> Callable[[], int] | None:
    """What says which device is current; None for a CPU."""
    if kind == "cpu":
        return None
    torch = sys.modules["torch"]
    # What torch.cuda.current_device asks once CUDA is initialised, which it is where a tensor lies on it.
    directly = _of_torch_npu("_npu_getDevice") if kind == "npu" else getattr(torch._C, "_cuda_getDevice", None)
    return directly or getattr(torch, kind).current_device


def _of_torch_npu(name: str) -> Callable[..., int] | None:
    """A function of torch_npu in C++, which PyTorch's API for it calls after some Python."""
    return getattr(getattr(sys.modules.get("torch_npu"), "_C", None), name, None)
