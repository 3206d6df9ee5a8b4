"""Chips: what is known of each, and which one a tensor is on."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

KIB = 1024
_CUBE_OPERATIONS = 2 * 16**3  # of a cube core in one cycle
ARCHS = ("dav-c220", "dav-c310")  # Ascend 910B and A3; 950: what a tile takes on chip was measured for these


class UnknownDeviceError(LookupError):
    """A chip that the table does not know; the message names the override."""


@dataclass(frozen=True)
class Device:
    """One chip, as a tiling needs to know it.

    Attributes:
        name: SoC name as the vendor's compiler spells it ("Ascend910B4"), or the CUDA device's name.
        kind: "ascend" or "cuda".
        arch: "dav-c220" or "dav-c310" on Ascend, "sm_90" and the like on CUDA. Another one of Ascend's is an
            `UnknownDeviceError`: what a tile takes on chip is a matter of the compiler for it.
        vector_cores: cores that run vector programs (AIV; streaming multiprocessors on CUDA).
        cube_cores: cores that run matrix programs (AIC; streaming multiprocessors on CUDA).
        ub_bytes: Unified Buffer of one vector core in bytes (on CUDA the shared memory one program may have).
        l1_bytes, l0a_bytes, l0b_bytes, l0c_bytes: the cube core's buffers in bytes, 0 on CUDA.
        ub_align: bytes that a row of a tile is padded to.
        max_grid: the largest number of programs of one launch.
        bandwidth: main memory, bytes per second, read and write counted alike; None where no figure is known.
        clock_hz: core clock in Hz; None where no figure is known.
        matrix_flops: operations per second of dense products of bf16 or fp16; None where no figure is known.
    """

    name: str
    kind: Literal["ascend", "cuda"]
    arch: str
    vector_cores: int
    cube_cores: int
    ub_bytes: int
    l1_bytes: int = 0
    l0a_bytes: int = 0
    l0b_bytes: int = 0
    l0c_bytes: int = 0
    ub_align: int = 32
    max_grid: int = 65535
    bandwidth: float | None = None
    clock_hz: float | None = None
    matrix_flops: float | None = None

    def __post_init__(self) -> None:
        if self.kind == "ascend" and self.arch not in ARCHS:
            known = " or ".join(map(repr, ARCHS))
            raise UnknownDeviceError(f"arch of {self.name} is {self.arch!r} and must be {known}, which tilings know.")

    def __hash__(self) -> int:  # by the name alone: tilings look themselves up by device on every launch
        return hash(self.name)


def _c220(name: str, cube_cores: int, bandwidth: float | None = None, clock_hz: float | None = None) -> Device:
    chip = _ascend(name, "dav-c220", cube_cores, 192 * KIB, 128 * KIB)
    flops = clock_hz and cube_cores * _CUBE_OPERATIONS * clock_hz
    return dataclasses.replace(chip, bandwidth=bandwidth, clock_hz=clock_hz, matrix_flops=flops)


def _c310(name: str, cube_cores: int) -> Device:
    return _ascend(name, "dav-c310", cube_cores, 248 * KIB, 256 * KIB)  # 256 KiB of UB less the 8 that the compiler reserves


def _ascend(name: str, arch: str, cube_cores: int, ub_bytes: int, l0c_bytes: int) -> Device:
    of_cube_core = {"l1_bytes": 512 * KIB, "l0a_bytes": 64 * KIB, "l0b_bytes": 64 * KIB, "l0c_bytes": l0c_bytes}
    return Device(name, "ascend", arch, 2 * cube_cores, cube_cores, ub_bytes, **of_cube_core)


# Cube cores, then every chip that has them: the target table that the Ascend compiler embeds in what it compiles.
_C310_CHIPS = {
    4: "Ascend910_950z Ascend950PR_950z",
    8: "Ascend950DT_950x Ascend950DT_950y",
    28: "Ascend910_9579 Ascend910_957b Ascend910_957d Ascend950PR_9579 Ascend950PR_957a Ascend950PR_957b "
    "Ascend950PR_957c Ascend950PR_957d Ascend950DT_9571 Ascend950DT_9572 Ascend950DT_9573 Ascend950DT_9574 "
    "Ascend950DT_9575 Ascend950DT_9576 Ascend950DT_9577 Ascend950DT_9578",
    32: "Ascend910_9581 Ascend910_9589 Ascend910_958a Ascend910_958b Ascend950PR_9589 Ascend950PR_958a "
    "Ascend950PR_958b Ascend950PR_958c Ascend950PR_958d Ascend950DT_9581 Ascend950DT_9582 Ascend950DT_9583 "
    "Ascend950DT_9584 Ascend950DT_9585 Ascend950DT_9586 Ascend950DT_9587 Ascend950DT_9588",
    36: "Ascend910_9599 Ascend950PR_9599 Ascend950PR_959a Ascend950PR_959b Ascend950DT_9591 Ascend950DT_9592 "
    "Ascend950DT_9595 Ascend950DT_9596 Ascend950DT_95A1 Ascend950DT_95A2",
}

# Bandwidths and clocks are secondary sources, rounded; None where none was found.
_CHIPS = (
    _c220("Ascend910B1", 24, 1.6e12, 1.85e9),
    _c220("Ascend910B2", 24, 1.6e12, 1.8e9),
    _c220("Ascend910B2C", 24),
    _c220("Ascend910B3", 20, 1.6e12, 1.8e9),
    _c220("Ascend910B4", 20, 0.8e12, 1.5e9),
    _c220("Ascend910B4-1", 20),
    *(_c220(f"Ascend910_{suffix}", 20, 1.6e12) for suffix in ("9362", "9363", "9372")),
    *(_c220(f"Ascend910_{suffix}", 24, 1.6e12) for suffix in ("9381", "9382", "9391", "9392")),
    *(_c310(name, cores) for cores, names in _C310_CHIPS.items() for name in names.split()),
)

SOCS: Mapping[str, Device] = MappingProxyType({chip.name: chip for chip in _CHIPS})
"""Every Ascend chip that tilings know, by SoC name."""


def _gpu(name: str, arch: str, cores: int, shared_memory: int, **rates: Any) -> Device:
    return Device(name, "cuda", arch, cores, cores, shared_memory, ub_align=16, max_grid=2**31 - 1, **rates)


# Streaming multiprocessors, bandwidths, boost clocks and rates of dense bf16 products are those of the SXM modules in
# NVIDIA's data sheets. Shared memory of a thread block: the CUDA C++ Programming Guide's table of compute capabilities,
# 163 KB for 8.0, 227 KB for 9.0 and 10.0.
GPUS: Mapping[str, Device] = MappingProxyType(
    {
        "A100": _gpu("A100", "sm_80", 108, 163 * KIB, bandwidth=2.04e12, clock_hz=1.41e9, matrix_flops=312e12),
        "H100": _gpu("H100", "sm_90", 132, 227 * KIB, bandwidth=3.35e12, clock_hz=1.98e9, matrix_flops=989e12),
        "H200": _gpu("H200", "sm_90", 132, 227 * KIB, bandwidth=4.8e12, clock_hz=1.98e9, matrix_flops=989e12),
        "B200": _gpu("B200", "sm_100", 148, 227 * KIB, bandwidth=7.7e12, clock_hz=1.97e9, matrix_flops=2250e12),
    }
)
"""A100, H100, H200 and B200, for calls that are explained where there is no GPU; one that is there describes itself."""


SOC_VARIABLE = "NPU_TILING_SOC"
"""The environment variable that names the SoC of `npu` tensors when set, e.g. NPU_TILING_SOC=Ascend910B4."""

# Overrides are process-wide, not per thread: autograd runs the backward of accelerator tensors on threads of its own.
_overrides: list[tuple[Device, bool]] = []
_found: dict[torch.device, Device | None] = {}


def soc(name: str) -> Device:
    """The description of the Ascend chip `name`.

    Raises:
        UnknownDeviceError: `name` is not in `SOCS`.
    """
    try:
        return SOCS[name]
    except KeyError:
        raise UnknownDeviceError(
            f"SoC {name!r} is not in npu_tiling.SOCS ({', '.join(list(SOCS)[:4])}, ...): set {SOC_VARIABLE} to a name "
            "of that table, or describe the chip with npu_tiling.use_device(npu_tiling.Device(...))."
        ) from None


def chip(name: str) -> Device:
    """The description of a chip of either kind, "Ascend910B4" or "H200".

    Raises:
        UnknownDeviceError: `name` is neither in `SOCS` nor in `GPUS`.
    """
    if name in GPUS:
        return GPUS[name]
    if name not in SOCS:
        known = f"npu_tiling.SOCS ({', '.join(list(SOCS)[:4])}, ...) nor in npu_tiling.GPUS ({', '.join(GPUS)})"
        raise UnknownDeviceError(f"chip {name!r} is neither in {known}.")
    return SOCS[name]


@contextlib.contextmanager
def use_device(device: Device, *, emulated: bool = False) -> Iterator[Device]:
    """Tile for `device`, whatever the running system reports, until the block ends. Process-wide; nests.

    Args:
        device: the chip to tile for.
        emulated: kernels tiled for `device` serve CPU tensors too: an emulator runs them; otherwise plain PyTorch
            serves CPU tensors, and the override is for accelerator tensors alone.

    Raises:
        TypeError: `device` is something else, as a chip's name.
    """
    if not isinstance(device, Device):
        raise TypeError(f"{device!r} must be an npu_tiling.Device, as npu_tiling.soc('Ascend910B4') is.")
    _overrides.append((device, emulated))
    try:
        yield device
    finally:
        _overrides.remove((device, emulated))


def is_overridden() -> bool:
    """Whether `use_device` or `plain_pytorch` is in force, in this thread."""
    return bool(_overrides or _plain.depth)


class _Plain(threading.local):
    depth = 0


_plain = _Plain()


@contextlib.contextmanager
def plain_pytorch() -> Iterator[None]:
    """Plain PyTorch serves every tensor of this thread, whatever its device, until the block ends."""
    _plain.depth += 1
    try:
        yield
    finally:
        _plain.depth -= 1


dry_runs: list[Device] = []
"""The chips that kernels are tiled for and not launched on; empty: kernels are launched."""


def device_for(device: torch.device) -> Device | None:
    """The chip whose kernels serve tensors on `device`; None where plain PyTorch does.

    None inside `plain_pytorch`; else in this order: the innermost `use_device` in force, the environment variable
    NPU_TILING_SOC (for `npu` tensors), what torch reports of that very device together with `SOCS`. The last two are
    looked up once per device.

    Args:
        device: the tensor's own `torch.device`.

    Raises:
        UnknownDeviceError: an `npu` device reports a chip that `SOCS` does not know.
    """
    if _plain.depth:
        return None
    if _overrides:
        for chip, emulated in reversed(_overrides):
            if emulated or device.type != "cpu":
                return chip
    try:
        return _found[device]
    except KeyError:
        found = _found[device] = _detect(device)
        return found


def _detect(device: torch.device) -> Device | None:
    if device.type == "cuda":
        return _detect_cuda(device)
    if device.type == "npu":
        return _detect_npu(device)
    if device.type == "cpu":
        return None
    raise UnknownDeviceError(f"tensors on {device.type!r} devices are not supported: use cpu, cuda or npu.")


def _detect_npu(device: torch.device) -> Device:
    named = os.environ.get(SOC_VARIABLE)
    if named:
        return soc(named)
    import torch

    properties = torch.npu.get_device_properties(device)  # type: ignore[attr-defined]  # torch_npu adds torch.npu
    chip = soc(properties.name)
    # Older torch_npu reports the name alone; a newer one also knows when some of the chip's cores are switched off.
    return dataclasses.replace(
        chip,
        vector_cores=getattr(properties, "vector_core_num", 0) or chip.vector_cores,
        cube_cores=getattr(properties, "cube_core_num", 0) or chip.cube_cores,
    )


def _detect_cuda(device: torch.device) -> Device:
    import torch

    properties = torch.cuda.get_device_properties(device)
    shared_memory = getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block
    arch = f"sm_{properties.major}{properties.minor}"
    return _gpu(properties.name, arch, properties.multi_processor_count, shared_memory)
