"""A Triton backend and driver for this host, in place of an Ascend chip's.

Triton's JIT is unchanged: it asks the active driver for target and device, compiles through the backend's stages, and keeps
the result in its own caches, in memory by device index and on disk by the backend's hash.
"""

from __future__ import annotations

import contextlib
import functools
import re
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import npu_tiling
import torch
from triton.backends import Backend, backends
from triton.backends.ascend.compiler import AscendBackend, NPUOptions, make_ttir
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from ..errors import OfflineError, UnsupportedError, reported
from ..toolchain.compilers import installed
from ..toolchain.frontend import changed_options, options_from, to_linalg
from .idle import first_configuration
from .linalg.lowering import ENTRY, lower
from .loading import Binary, load
from .meaning.launch import texts
from .native import kept_object, native_key, shared_object

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp

EMULATED, RECORDED = "npu-offline-emulated", "npu-offline-recorded"  # first parts of the names of architectures
FINAL, CHECKED, MEANING = "final", "checked", "meaning"  # levels of emulation; the level of Linalg IR is the empty string
_FIRST_DEVICE = 1 << 16  # far above any real device's index, as the JIT's in-memory cache is shared


class _HostBackend(AscendBackend):
    """The Ascend front end; subclasses add the stages after it."""

    kind = ""

    @classmethod
    def supports_target(cls, target: GPUTarget) -> bool:
        return str(target.arch).startswith(f"{cls.kind}/")

    def __init__(self, target: GPUTarget) -> None:
        self.target = target
        self.binary_ext = "npubin"
        parts = [unquote(part) for part in str(target.arch).split("/")]
        _, self.soc, self.toolchain, self.level, self.mutation, compilation = (*parts, "", "", "", "")[:6]
        self.compilation = int(compilation or 0)

    def parse_options(self, opts: dict[str, Any]) -> NPUOptions:
        return options_from(opts)

    def pack_metadata(self, metadata: Any) -> dict[str, Any]:
        return {}

    def hash(self) -> str:
        return f"{self.target}-{native_key()}"

    def add_stages(self, stages: dict[str, Callable[..., Any]], options: NPUOptions) -> None:
        stages["ttir"] = lambda module, metadata: make_ttir(module, metadata, options)


def _emulated_object(linalg: str, toolchain: str) -> bytes:
    """The Linalg IR as a shared object: the same for every chip, and wherever in its file the kernel stands."""
    return kept_object(f"linalg {toolchain}\n{linalg}", lambda: shared_object(lower(linalg, toolchain)))


@functools.lru_cache(maxsize=64)
def _linalg_object(linalg: str) -> bytes:
    """The Linalg IR as a shared object, for comparison with final modules; empty where the emulator cannot run it.

    Like final modules, it computes sums of fp16 in fp32.
    """
    newest = installed()[-1]

    def build() -> bytes:
        try:
            return shared_object(lower(linalg, newest, wide_sums=True))
        except UnsupportedError:
            return b""

    return kept_object(f"wide sums {newest}\n{linalg}", build)


class EmulatedBackend(_HostBackend):
    """Compiles the Linalg IR for this host."""

    kind = EMULATED

    def add_stages(self, stages: dict[str, Callable[..., Any]], options: NPUOptions) -> None:
        @reported
        def meaning(module: Any, metadata: dict[str, Any]) -> bytes:
            metadata.update(name="kernel", shared=0)
            return str(module).encode()

        @reported
        def binary(linalg: str, metadata: dict[str, Any]) -> bytes:
            metadata.update(name="kernel", shared=0)
            if not self.level:
                return Binary(_emulated_object(linalg, self.toolchain)).packed()
            return self._final(linalg, options)

        super().add_stages(stages, options)
        if self.level == MEANING:
            stages["npubin"] = meaning
            return
        stages["ttadapter"] = lambda module, metadata: to_linalg(module, options)
        stages["npubin"] = binary

    def _final(self, linalg: str, options: NPUOptions) -> bytes:
        """The final module and, with checks, the Linalg IR to compare it with."""
        from .final.compile import executable, final_module

        changed = changed_options(options)
        name = re.search(r"func\.func @(\w+)", linalg)
        final = final_module(name[1] if name else "kernel", linalg, changed, self.soc, self.toolchain, self.compilation)
        beside = _linalg_object(linalg) if self.level == CHECKED else b""
        return Binary(executable(final, self.soc, self.toolchain, mutations.get(self.mutation)), beside).packed()


class RecordedBackend(_HostBackend):
    """Stops after TTIR: enough to know that a launch is well formed."""

    kind = RECORDED

    def add_stages(self, stages: dict[str, Callable[..., Any]], options: NPUOptions) -> None:
        def nothing(module: Any, metadata: dict[str, Any]) -> bytes:
            metadata.update(name="kernel", shared=0)
            return b""

        super().add_stages(stages, options)
        stages["npubin"] = nothing


_device = "cpu"  # libraries take the target's name for a torch device, and for a module of torch
_indices: dict[GPUTarget, int] = {}
mutations: dict[str, Callable[[ModuleOp], object]] = {}
"""Functions that change final modules before they run, by a name that is unique among all processes."""


def emulated_target(
    soc: str,
    toolchain: str,
    level: str = "",
    mutate: Callable[[ModuleOp], object] | None = None,
    compilation: int = 0,
) -> GPUTarget:
    """The target of kernels compiled to run here as on `soc`: from Linalg IR, or from their final modules."""
    mutation = ""
    if mutate is not None:
        mutation = uuid.uuid4().hex
        mutations[mutation] = mutate
    return GPUTarget(_device, f"{EMULATED}/{soc}/{quote(toolchain, safe='')}/{level}/{mutation}/{compilation or ''}", 0)


def recorded_target() -> GPUTarget:
    """The target of kernels that are only recorded: one for all chips, since the front end knows none."""
    return GPUTarget(_device, f"{RECORDED}/any", 0)


@contextlib.contextmanager
def seen_as(device: str) -> Iterator[None]:
    """Until the block ends, libraries that ask Triton for the device of new targets are told this one, not "cpu"."""
    global _device
    before, _device = _device, device
    try:
        yield
    finally:
        _device = before


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
        return first_configuration()

    def get_active_torch_device(self) -> Any:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return getattr(torch, "npu", torch.cpu)

    def get_device_properties(self, device: int) -> dict[str, int]:
        """As the Ascend driver reports them."""
        return {
            "max_shared_mem": 1,
            "num_aicore": self.device.cube_cores,
            "num_vectorcore": self.device.vector_cores,
        }

    @reported
    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, int | None, int, int]:
        if not binary:
            return None, None, 0, 0
        if f"/{MEANING}/" in str(self.target.arch):
            texts.append(binary.decode())
            return None, len(texts) - 1, 0, 0
        libraries = load(Binary.unpacked(binary), ENTRY)
        return libraries, libraries.address, 0, 0


def _leave_ours(compiler: Any) -> None:
    """Let a backend for chips refuse the targets of this file, which have the same name."""
    supports = compiler.supports_target

    def is_for_chips(target: GPUTarget) -> bool:
        ours = any(backend.supports_target(target) for backend in (EmulatedBackend, RecordedBackend))
        return not ours and bool(supports(target))

    compiler.supports_target = staticmethod(is_for_chips)


for _other in list(backends.values()):
    _leave_ours(_other.compiler)
for _backend in (EmulatedBackend, RecordedBackend):
    backends[_backend.kind] = Backend(compiler=_backend, driver=HostDriver)
