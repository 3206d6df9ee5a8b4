"""flash-linear-attention's Ascend kernels of Attention Residuals, on a machine without a chip.

Needs the wheel: pip install --no-deps fla-core==0.6.0
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import npu_tiling
from npu_offline import LaunchRecord, OfflineError, record
from torch import Tensor

VERSION = "0.6.0"
_BACKEND = "fla.ops.attnres.backends.triton_ascend"
_EPS, _SCALE, _RECOMPUTE = 1e-6, 1.0, 1  # its defaults


def missing() -> str | None:
    """Why the peer cannot be compared with, None if it can."""
    return None if importlib.util.find_spec("fla") else f"pip install --no-deps fla-core=={VERSION}"


def launches(
    blocks: list[Tensor], query: Tensor, weight: Tensor, dh: Tensor, soc: str
) -> tuple[list[LaunchRecord], list[LaunchRecord]]:
    """The launches of its forward and of its backward, without the copy of the blocks into one tensor that comes first.

    Raises:
        OfflineError: fla-core is not installed.
    """
    fused = _module()
    capacity = {"ASCEND_UB_CAPACITY_BITS": str(npu_tiling.soc(soc).ub_bytes * 8)}
    given = (query, blocks, weight, None)
    with mock.patch.dict(os.environ, capacity):
        with record(soc) as forward:
            _, h, *statistics, stacked = fused.fused_attnres_fwd_npu(*given, _EPS, _SCALE, _RECOMPUTE)
        with record(soc) as backward:
            fused.fused_attnres_bwd_npu(dh, *given, h, *statistics, _EPS, _SCALE, stacked=stacked)
    return list(forward), list(backward)


@functools.cache
def _module() -> Any:
    """The module of its kernels and of what launches them.

    Its packages import every operator that fla has; empty packages with the same paths stand in their place meanwhile.
    """
    hint = missing()
    if hint:
        raise OfflineError(f"fla-core is not installed: {hint}")
    found = importlib.util.find_spec("fla")
    assert found is not None and found.submodule_search_locations
    root = Path(next(iter(found.submodule_search_locations))).parent
    with mock.patch.dict(sys.modules), record():  # it asks Triton for its driver while it is imported
        for package in ("fla.ops.utils", _BACKEND):
            parts = package.split(".")
            for end in range(1, len(parts) + 1):
                stand_in = types.ModuleType(".".join(parts[:end]))
                stand_in.__dict__.update(__path__=[str(root.joinpath(*parts[:end]))], __version__=VERSION)
                sys.modules[stand_in.__name__] = stand_in
        return importlib.import_module(f"{_BACKEND}.fused")
