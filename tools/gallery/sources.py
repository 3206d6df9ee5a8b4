"""Loads kernels of other projects where no NPU is: none of their code is in this repository."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import npu_tiling
import torch
from npu_offline import OfflineError, record
from npu_offline.check.files import load_file

from ..compare import peers

SOC = "Ascend910B4"
_CHIP = npu_tiling.soc(SOC)
_CORES = ("get_npu_core_count", "get_multiprocessor_count", "get_num_cores")
_PROPERTIES = {"num_aicore": _CHIP.cube_cores, "num_vectorcore": _CHIP.vector_cores}


class MissingError(OfflineError):
    """A source is not on this machine."""


TITLES = {
    "liger": "Liger-kernel 0.8.5, kernels for Ascend",
    "fla": "Flash-linear-attention (fla-core 0.6.0), kernels for Ascend",
    "tutorials": "Triton-ascend, tutorials of commit eeb030e (18 April 2026)",
    "mojo": "Mojo_opset, kernels for A2 of commit b97e98b (6 August 2026)",
}
"""What each source is."""

folders: dict[str, Path] = {}
"""Where checked-out repositories lie, by source."""


def liger(name: str) -> Any:
    """A module of liger-kernel's Ascend backend."""
    if peers.missing():
        raise MissingError(f"liger-kernel is not installed: {peers.missing()}")
    return _on_chip(peers.module(name))


def fla(name: str) -> Any:
    """A module of fla-core."""
    try:
        importlib.import_module("fla.utils.hardware")  # decides that there is no device: outside of `record`
    except ModuleNotFoundError as error:
        raise MissingError(f"{error}: pip install --no-deps fla-core==0.6.0 einops==0.8.2") from None
    with record(SOC):
        return _on_chip(importlib.import_module(f"fla.{name}"))


def tutorial(name: str) -> Any:
    """One of triton-ascend's tutorials, up to where it goes on to run on a chip."""
    return load_file(_folder("tutorials") / "third_party" / "ascend" / "tutorials" / f"{name}.py", partly=True)


def mojo(name: str) -> Any:
    """A module of mojo_opset's Triton kernels; empty packages stand in place of those that import all of its backends."""
    root = _folder("mojo")
    for package in ("mojo_opset", *(f"mojo_opset.{p}" for p in ("backends", "backends.ttx", "utils"))):
        _stand_in(package, root)
    for package in ("backends.ttx.kernels", "backends.ttx.kernels.npu", "backends.ttx.kernels.npu.a2"):
        _stand_in(f"mojo_opset.{package}", root)
    with record(SOC):
        sys.modules["mojo_opset.backends.ttx.kernels"].__dict__.update(_helpers(root))
        return _on_chip(importlib.import_module(f"mojo_opset.backends.ttx.kernels.npu.a2.{name}"))


@contextlib.contextmanager
def on_chip() -> Iterator[None]:
    """Until the block ends, libraries are told the chip's Unified Buffer, which they ask the system for."""
    properties = types.SimpleNamespace(current_device=lambda: 0, is_available=lambda: True)
    with (
        mock.patch.dict(os.environ, {"ASCEND_UB_CAPACITY_BITS": str(_CHIP.ub_bytes * 8)}),
        mock.patch.object(torch, "npu", properties, create=True),
    ):
        yield


def _on_chip(module: Any) -> Any:
    """The same module, told how many cores the chip has."""
    for name in _CORES:
        if hasattr(module, name):
            setattr(module, name, _cores)
    if hasattr(module, "get_npu_properties"):
        module.get_npu_properties = lambda: _PROPERTIES
    return module


def _cores(kind: object = "vector", *, use_aicore: bool = False) -> int:
    return _CHIP.cube_cores if use_aicore or kind in ("cube", "mix") else _CHIP.vector_cores


def _folder(source: str) -> Path:
    if source not in folders:
        raise MissingError(f"{TITLES[source]}: give the folder of its repository")
    return folders[source]


def _stand_in(name: str, root: Path) -> None:
    if name not in sys.modules:
        module = types.ModuleType(name)
        module.__path__ = [str(root / name.replace(".", "/"))]
        sys.modules[name] = module


def _helpers(root: Path) -> dict[str, Any]:
    path = root / "mojo_opset" / "backends" / "ttx" / "kernels" / "utils.py"
    return vars(load_file(path)) if path.is_file() else {}
