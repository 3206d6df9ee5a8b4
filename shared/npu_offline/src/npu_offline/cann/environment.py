"""The environment variables of a process that runs over the stand-in."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import npu_tiling
from npu_tiling.doctor import torch_npu_problems

from ..errors import OfflineError, ToolchainMissingError
from ..execute.native import native_key, runtime_path
from ..toolchain.cache import cache_dir
from ..toolchain.compilers import DEFAULT, compiler
from .build import build, versions

KERNELS = ("final", "linalg")


def environment(
    soc: str = "Ascend910B4",
    *,
    devices: int = 2,
    streams: str = "late",
    kernels: str = "final",
    toolchain: str = DEFAULT,
    exact: bool = False,
    skip: bool = False,
    trace: bool = False,
) -> dict[str, str]:
    """What to add to `os.environ` for a process that imports torch_npu; builds the stand-in where that is needed.

    Args:
        soc: the chip to be, a name of `npu_tiling.SOCS`.
        devices: how many there are.
        streams: "late": work is done when the host waits for it; "eager": at once; a number: the seed of a random order.
        kernels: what kernels run from: "final", the module that the compiler hands to its last step; "linalg", the IR that
            it is given, also in place of a final module that cannot run here; standard error says so.
        toolchain: the compiler version that kernels are compiled by.
        exact: switch off torch_npu's caching allocator: accesses are checked against the tensor, not its segment.
        skip: kernels do nothing.
        trace: launches and their completion are written to standard error.

    Raises:
        ToolchainMissingError: the compiler, torch_npu or a C++ compiler is missing, or torch_npu is not for this torch.
        OfflineError: the compiler cannot compile for that chip, or another argument is wrong.
    """
    chip = npu_tiling.soc(soc)
    if kernels not in KERNELS:
        raise OfflineError(f"kernels is {kernels!r}, must be one of {', '.join(KERNELS)}")
    program = compiler(soc, toolchain)
    if program is None:
        raise OfflineError(f"toolchain {toolchain} cannot compile for {soc}")
    for problem in torch_npu_problems():  # which would end the command with an uncaught error of C++
        raise ToolchainMissingError(str(problem))
    folder = build()
    variables = {
        "ASCEND_HOME_PATH": str(folder),
        "ASCEND_OPP_PATH": str(folder / "opp"),
        "LD_LIBRARY_PATH": _before("LD_LIBRARY_PATH", str(folder / "lib64")),
        "PATH": _before("PATH", str(folder / "bin")),
        "PYTHONPATH": _before("PYTHONPATH", str(folder / "python")),
        "TRITON_CACHE_DIR": str(cache_dir() / "cann" / f"triton-{_made_by()}-{soc}-{toolchain}-{kernels}"),
        "NPU_OFFLINE_CANN_COMPILER": str(program),
        "NPU_OFFLINE_CANN_CUBE_CORES": str(chip.cube_cores),
        "NPU_OFFLINE_CANN_DEVICES": str(devices),
        "NPU_OFFLINE_CANN_KERNELS": kernels,
        "NPU_OFFLINE_CANN_RUNTIME": str(runtime_path()),
        "NPU_OFFLINE_CANN_SOC": soc,
        "NPU_OFFLINE_CANN_STREAMS": streams,
        "NPU_OFFLINE_CANN_TOOLCHAIN": toolchain,
        "NPU_OFFLINE_CANN_VECTOR_CORES": str(chip.vector_cores),
    }
    switches = {"PYTORCH_NO_NPU_MEMORY_CACHING": exact, "NPU_OFFLINE_CANN_SKIP": skip, "NPU_OFFLINE_CANN_TRACE": trace}
    return variables | {name: "1" for name, on in switches.items() if on}


def _made_by() -> str:
    """A digest of what compiled kernels depend on beside chip and compiler."""
    here = Path(__file__).parent
    digest = hashlib.sha256(" ".join([native_key(), *versions("torch", "torch_npu", "triton-ascend")]).encode())
    for path in (here / "compiler.py", *sorted((here / "csrc/include").rglob("*.h"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _before(name: str, path: str) -> str:
    return os.pathsep.join([path, *filter(None, [os.environ.get(name)])])
