"""What is known of each chip: core counts, on-chip buffers, limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from ..errors import UnknownDeviceError

KIB = 1024
_CUBE_OPERATIONS = 2 * 16**3  # of a cube core in one cycle
ARCHS = ("dav-c220", "dav-c310")  # Ascend 910B and A3; 950: what a tile takes on chip was measured for these


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
    return Device(
        name=name,
        kind="ascend",
        arch="dav-c220",
        vector_cores=2 * cube_cores,
        cube_cores=cube_cores,
        ub_bytes=192 * KIB,
        l1_bytes=512 * KIB,
        l0a_bytes=64 * KIB,
        l0b_bytes=64 * KIB,
        l0c_bytes=128 * KIB,
        bandwidth=bandwidth,
        clock_hz=clock_hz,
        matrix_flops=clock_hz and cube_cores * _CUBE_OPERATIONS * clock_hz,
    )


def _c310(name: str, cube_cores: int) -> Device:
    return Device(
        name=name,
        kind="ascend",
        arch="dav-c310",
        vector_cores=2 * cube_cores,
        cube_cores=cube_cores,
        ub_bytes=248 * KIB,  # 256 KiB less the 8 that the compiler reserves
        l1_bytes=512 * KIB,
        l0a_bytes=64 * KIB,
        l0b_bytes=64 * KIB,
        l0c_bytes=256 * KIB,
    )


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


def _gpu(
    name: str, arch: str, cores: int, shared_memory: int, bandwidth: float, clock_hz: float, matrix_flops: float
) -> Device:
    return Device(
        name=name,
        kind="cuda",
        arch=arch,
        vector_cores=cores,
        cube_cores=cores,
        ub_bytes=shared_memory,
        ub_align=16,
        max_grid=2**31 - 1,
        bandwidth=bandwidth,
        clock_hz=clock_hz,
        matrix_flops=matrix_flops,
    )


# Streaming multiprocessors, bandwidths, boost clocks and rates of dense bf16 products are those of the SXM modules in
# NVIDIA's data sheets. Shared memory of a thread block: the CUDA C++ Programming Guide's table of compute capabilities,
# 163 KB for 8.0, 227 KB for 9.0 and 10.0.
GPUS: Mapping[str, Device] = MappingProxyType(
    {
        "A100": _gpu("A100", "sm_80", 108, 163 * KIB, 2.04e12, 1.41e9, 312e12),
        "H100": _gpu("H100", "sm_90", 132, 227 * KIB, 3.35e12, 1.98e9, 989e12),
        "H200": _gpu("H200", "sm_90", 132, 227 * KIB, 4.8e12, 1.98e9, 989e12),
        "B200": _gpu("B200", "sm_100", 148, 227 * KIB, 7.7e12, 1.97e9, 2250e12),
    }
)
"""CUDA devices for calls that are explained where there is no GPU; one that is there describes itself."""
