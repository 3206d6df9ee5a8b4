"""liger-kernel's Ascend kernels, on a machine without one. Needs the wheel: pip install --no-deps liger-kernel==0.8.5"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import npu_tiling
from npu_offline import OfflineError, record

VERSION = "0.8.5"
_BACKEND = "liger_kernel.ops.backends._ascend"


def missing() -> str | None:
    """Why the peer cannot be compared with, None if it can."""
    return None if importlib.util.find_spec("liger_kernel") else f"pip install --no-deps liger-kernel=={VERSION}"


def module(name: str) -> Any:
    """One module of its Ascend backend.

    The package of these modules imports every operator that liger has, some of which need parts of triton-ascend that its
    wheel for CPUs lacks; an empty package with the same path stands in its place.

    Raises:
        OfflineError: liger-kernel is not installed.
    """
    hint = missing()
    if hint:
        raise OfflineError(f"liger-kernel is not installed: {hint}")
    operators = f"{_BACKEND}.ops"
    if operators not in sys.modules:
        with record():
            backend = importlib.import_module(_BACKEND)
        stand_in = types.ModuleType(operators)
        stand_in.__path__ = [str(Path(next(iter(backend.__path__))) / "ops")]
        sys.modules[operators] = stand_in
    with record():  # liger asks Triton for its driver while it is imported
        return importlib.import_module(f"{operators}.{name}")


@contextlib.contextmanager
def on_chip(soc: str) -> Iterator[None]:
    """Until the block ends, liger is told a chip's Unified Buffer and vector cores, which it asks the system for."""
    device = npu_tiling.soc(soc)
    modules = [module(name) for name in ("rms_norm", "embedding", "attn_res", "cross_entropy")]
    patches = [mock.patch.object(each, "get_npu_core_count", lambda *_: device.vector_cores) for each in modules]
    capacity = {"ASCEND_UB_CAPACITY_BITS": str(device.ub_bytes * 8)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, capacity))
        for patch in patches:
            stack.enter_context(patch)
        yield
