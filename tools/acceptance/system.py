"""What a report must say of the machine: the chip, and the versions of everything between it and a kernel."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import npu_tiling
import torch

from ..workspace import ROOT, read_packages

DISTRIBUTIONS = ("torch", "torch_npu", "triton-ascend", "triton")
_TOOLKIT_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
_TOOLKIT_FOLDERS = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann")


def describe(device: str) -> dict[str, Any]:
    """The machine and its software; what cannot be found is None."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cann": cann_version(),
        **{name: _version(name) for name in DISTRIBUTIONS},
        "packages": {package.name: package.version for package in read_packages().values()},
        "revision": _said(["git", "-C", str(ROOT), "describe", "--always", "--dirty"]),
    }
    if device == "npu":
        found["npu-smi"] = _said(["npu-smi", "info"])
        found.update(chip())
    return found


def chip() -> dict[str, Any]:
    """What torch_npu reports of the current NPU, and what tiles are made for because of it."""
    backend = torch.npu  # type: ignore[attr-defined]  # torch_npu adds it
    here = torch.device("npu", backend.current_device())
    properties = backend.get_device_properties(here)
    reported = {name: getattr(properties, name) for name in dir(properties) if not name.startswith("_")}
    tiled_for = npu_tiling.device_for(here)
    assert tiled_for is not None
    return {
        "soc": properties.name,
        "devices": backend.device_count(),
        "reported": {name: value for name, value in reported.items() if isinstance(value, (bool, int, float, str))},
        "tiled_for": asdict(tiled_for),
    }


def cann_version() -> str | None:
    """The version that CANN's toolkit wrote beside itself when it was installed."""
    named = [os.environ[variable] for variable in _TOOLKIT_VARIABLES if os.environ.get(variable)]
    for folder in (*named, *_TOOLKIT_FOLDERS):
        info = Path(folder, f"{platform.machine()}-linux", "ascend_toolkit_install.info")
        if info.is_file():
            lines = dict(line.split("=", 1) for line in info.read_text().splitlines() if "=" in line)
            return lines.get("version")
    return None


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _said(command: list[str]) -> str | None:
    """What a program printed, None where there is no such program or it failed."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None
