"""The environment variables of a process that runs over the stand-in."""

from __future__ import annotations

import os

import npu_tiling

from ..cache import cache_dir
from ..native import runtime_path
from ..toolchains import DEFAULT, tool
from .build import build


def environment(
    soc: str = "Ascend910B4",
    *,
    devices: int = 2,
    streams: str = "late",
    toolchain: str = DEFAULT,
    exact: bool = False,
    skip: bool = False,
    trace: bool = False,
) -> dict[str, str]:
    """What to add to `os.environ` for a process that imports torch_npu; builds the stand-in where that is needed.

    Args:
        soc: the chip to be, a name of `npu_tiling.SOCS`.
        devices: how many there are.
        streams: when streams work: "late", once somebody waits; "eager", at once; a number: the seed of a random order.
        toolchain: the compiler version that kernels are compiled by.
        exact: without torch_npu's caching allocator: kernels are held to the bytes of their tensors, not of a segment.
        skip: kernels do nothing.
        trace: launches and their completion are written to standard error.

    Raises:
        ToolchainMissingError: the compiler, torch_npu or a C++ compiler is missing.
    """
    chip = npu_tiling.soc(soc)
    tool(toolchain, "bishengir-compile")
    folder = build()
    variables = {
        "ASCEND_HOME_PATH": str(folder),
        "ASCEND_OPP_PATH": str(folder / "opp"),
        "LD_LIBRARY_PATH": _before("LD_LIBRARY_PATH", str(folder / "lib64")),
        "PATH": _before("PATH", str(folder / "bin")),
        "PYTHONPATH": _before("PYTHONPATH", str(folder / "python")),
        "TRITON_CACHE_DIR": str(cache_dir() / "cann" / f"triton-{folder.name}-{soc}-{toolchain}"),
        "NPU_OFFLINE_CANN_CUBE_CORES": str(chip.cube_cores),
        "NPU_OFFLINE_CANN_DEVICES": str(devices),
        "NPU_OFFLINE_CANN_RUNTIME": str(runtime_path()),
        "NPU_OFFLINE_CANN_SOC": soc,
        "NPU_OFFLINE_CANN_STREAMS": streams,
        "NPU_OFFLINE_CANN_TOOLCHAIN": toolchain,
        "NPU_OFFLINE_CANN_VECTOR_CORES": str(chip.vector_cores),
    }
    switches = {"PYTORCH_NO_NPU_MEMORY_CACHING": exact, "NPU_OFFLINE_CANN_SKIP": skip, "NPU_OFFLINE_CANN_TRACE": trace}
    return variables | {name: "1" for name, on in switches.items() if on}


def _before(name: str, path: str) -> str:
    return os.pathsep.join([path, *filter(None, [os.environ.get(name)])])
