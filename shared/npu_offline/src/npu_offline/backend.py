"""A Triton backend and driver whose device is this host, standing where an Ascend chip would.

Triton's JIT stays as it is: it finds the driver active, asks it for the target and the device, compiles through the
backend's stages and keeps the result in its own caches, in memory by device index and on disk by the backend's hash.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import npu_tiling
from triton.backends import Backend, backends
from triton.backends.ascend.compiler import AscendBackend, NPUOptions, make_ttir
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from .errors import OfflineError
from .frontend import options_from, to_linalg
from .lowering import ENTRY, lower
from .native import load, native_key, shared_object

EMULATED, RECORDED = "npu-offline-emulated", "npu-offline-recorded"
_FIRST_DEVICE = 1 << 16  # far above the index of any real device, which shares the JIT's in-memory cache with ours


class _HostBackend(AscendBackend):
    """The Ascend front end; what follows it is the subclass's."""

    kind = ""

    @classmethod
    def supports_target(cls, target: GPUTarget) -> bool:
        return bool(target.backend == cls.kind)

    def __init__(self, target: GPUTarget) -> None:
        self.target = target
        self.binary_ext = "npubin"
        self.toolchain = str(target.arch).rpartition("/")[2]

    def parse_options(self, opts: dict[str, Any]) -> NPUOptions:
        return options_from(opts)

    def pack_metadata(self, metadata: Any) -> dict[str, Any]:
        return {}

    def hash(self) -> str:
        return f"{self.target}-{native_key()}"

    def add_stages(self, stages: dict[str, Callable[..., Any]], options: NPUOptions) -> None:
        stages["ttir"] = lambda module, metadata: make_ttir(module, metadata, options)


class EmulatedBackend(_HostBackend):
    """Compiles the Linalg IR for this host."""

    kind = EMULATED

    def add_stages(self, stages: dict[str, Callable[..., Any]], options: NPUOptions) -> None:
        def binary(linalg: str, metadata: dict[str, Any]) -> bytes:
            metadata.update(name="kernel", shared=0)
            return shared_object(lower(linalg, self.toolchain))

        super().add_stages(stages, options)
        stages["ttadapter"] = lambda module, metadata: to_linalg(module, options)
        stages["npubin"] = binary


class RecordedBackend(_HostBackend):
    """Stops after TTIR: enough to know that a launch is well formed."""

    kind = RECORDED

    def add_stages(self, stages: dict[str, Callable[..., Any]], options: NPUOptions) -> None:
        def nothing(module: Any, metadata: dict[str, Any]) -> bytes:
            metadata.update(name="kernel", shared=0)
            return b""

        super().add_stages(stages, options)
        stages["npubin"] = nothing


_indices: dict[GPUTarget, int] = {}


def emulated_target(soc: str, toolchain: str) -> GPUTarget:
    """The target of kernels compiled to run here as on `soc`."""
    return GPUTarget(EMULATED, f"{soc}/{toolchain}", 0)


def recorded_target() -> GPUTarget:
    """The target of kernels that are only recorded: one for all chips, since the front end knows none."""
    return GPUTarget(RECORDED, "any", 0)


class HostDriver(DriverBase):
    """What Triton asks of a device. One device index per target keeps the kernels of each apart."""

    def __init__(self, target: GPUTarget, device: npu_tiling.Device, launcher: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.device = device
        self.target = target
        self.index = _indices.setdefault(target, _FIRST_DEVICE + len(_indices))
        self.launcher_cls = launcher
        self.utils = self

    @classmethod
    def is_active(cls) -> bool:
        return False  # never found by looking for hardware, only set by `emulate` and `record`

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.index

    def set_current_device(self, device: int) -> None:
        if device != self.index:
            raise OfflineError(f"device is {device}, must be {self.index}: emulation has one device")

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_benchmarker(self) -> Callable[..., Any]:
        from triton.testing import do_bench

        return do_bench

    def get_device_properties(self, device: int) -> dict[str, int]:
        """As the Ascend driver reports them."""
        return {
            "max_shared_mem": 1,
            "num_aicore": self.device.cube_cores,
            "num_vectorcore": self.device.vector_cores,
        }

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, int | None, int, int]:
        if not binary:
            return None, None, 0, 0
        library = load(binary)
        return library, ctypes.cast(getattr(library, ENTRY), ctypes.c_void_p).value, 0, 0


for _backend in (EmulatedBackend, RecordedBackend):
    # Our targets have names of their own, so these can stay beside the backends of real devices.
    backends[_backend.kind] = Backend(compiler=_backend, driver=HostDriver)
