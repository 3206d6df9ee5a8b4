"""Which chip a tensor is on: an override, an environment variable, or what the running system reports."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..errors import UnknownDeviceError
from .devices import GPUS, SOCS, Device

if TYPE_CHECKING:
    import torch

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
    """
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


@contextlib.contextmanager
def dry_device(device: Device) -> Iterator[Device]:
    """Tile for `device`, whatever device tensors are on (meta too); kernels are not launched. Process-wide; nests."""
    with use_device(device, emulated=True):
        dry_runs.append(device)
        try:
            yield device
        finally:
            dry_runs.remove(device)


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
    return Device(
        name=properties.name,
        kind="cuda",
        arch=f"sm_{properties.major}{properties.minor}",
        vector_cores=properties.multi_processor_count,
        cube_cores=properties.multi_processor_count,
        ub_bytes=shared_memory,
        ub_align=16,
        max_grid=2**31 - 1,
    )
