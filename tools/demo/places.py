"""Where our operators run: an accelerator, the emulated one, or plain PyTorch on the CPU."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import npu_tiling
import torch

if TYPE_CHECKING:
    import npu_offline  # needs triton-ascend, which an environment for CUDA cannot have

NAMES = ("npu", "cuda", "cpu", "emulated")
DEFAULT_SOC = "Ascend910B4"


class PlaceError(RuntimeError):
    """The place that was asked for is not there, or an option does not apply to it."""


@dataclass(frozen=True)
class Place:
    """One of `NAMES`, and the Ascend chip that kernels are made for; None where there is none."""

    name: str
    soc: str | None

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return torch.device("cpu" if self.name == "emulated" else self.name)

    def __str__(self) -> str:
        if self.name == "emulated":
            return f"emulated {self.soc}"
        if self.name == "cpu":
            return "CPU"
        return self.soc or torch.cuda.get_device_name()

    @contextlib.contextmanager
    def open(self) -> Iterator[npu_offline.Emulation | None]:
        """In the block our operators run here; yields the emulation, if it is one."""
        if self.name == "emulated":
            import npu_offline

            assert self.soc is not None
            with npu_offline.emulate(self.soc) as emulation:
                yield emulation
        elif self.name == "npu":
            assert self.soc is not None
            with npu_tiling.use_device(npu_tiling.soc(self.soc)):
                yield None
        else:
            yield None


def find_place(name: str | None, soc: str | None) -> Place:
    """The place called `name`; None: the accelerator of this machine, and the emulated one where there is none.

    Args:
        name: one of `NAMES`, or None.
        soc: the Ascend chip to emulate, or what the `npu` device is to be taken for; None: the usual one, or what the
            system reports.

    Raises:
        PlaceError: this machine has no such device, or the place has no Ascend chip and one was named.
    """
    if name is None:
        name = next((accelerator for accelerator in ("npu", "cuda") if _missing(accelerator) is None), "emulated")
    missing = _missing(name)
    if missing is not None:
        raise PlaceError(f"--device {name} cannot be: {missing}.")
    if name in ("cuda", "cpu"):
        if soc is not None:
            raise PlaceError(f"--soc is {soc} and applies to --device emulated and npu alone, not to {name}.")
        return Place(name, None)
    if soc is not None and soc not in npu_tiling.SOCS:
        raise PlaceError(f"--soc is {soc} and must be one of {', '.join(npu_tiling.SOCS)}.")
    if name == "npu" and soc is None:
        chip = npu_tiling.device_for(torch.device("npu"))
        assert chip is not None
        soc = chip.name
    return Place(name, soc or DEFAULT_SOC)


def has_offline_compiler() -> bool:
    """Whether npu-offline can be imported, which compiles and emulates."""
    return importlib.util.find_spec("npu_offline") is not None and _triton_serves("ascend")


def _missing(name: str) -> str | None:
    """What this machine lacks for a place; None if nothing."""
    if name == "npu":
        if not (hasattr(torch, "npu") and torch.npu.is_available()):
            return "torch.npu finds no Ascend NPU, or torch_npu is not installed"
        return None if _triton_serves("ascend") else "triton-ascend is not installed"
    if name == "cuda":
        if not torch.cuda.is_available():
            return "torch.cuda finds no GPU"
        # Both distributions own the module `triton`; where they meet, the one for Ascend has replaced the other.
        if _triton_serves("nvidia") and not _triton_serves("ascend"):
            return None
        return "the installed Triton is not the one for CUDA"
    if name == "emulated":
        if not has_offline_compiler():
            return "it takes npu-offline and triton-ascend, and one of them is not installed"
        import npu_offline

        try:
            with npu_offline.emulate(DEFAULT_SOC):
                return None
        except npu_offline.ToolchainMissingError as error:
            return str(error)
    return None


def _triton_serves(backend: str) -> bool:
    find = importlib.util.find_spec
    return find("triton") is not None and find(f"triton.backends.{backend}") is not None
