"""The decision what runs: `Shape` -> `Tiling`. Each chip has tables, of which the first row that fits or matches is
taken."""

from __future__ import annotations

from npu_tiling import Device

from .ascend.tiling import choice as ascend
from .ascend.tiling.choice import AscendTiling
from .cuda.tiling import choice as cuda
from .cuda.tiling.choice import CudaTiling
from .shape import Shape

Tiling = AscendTiling | CudaTiling


def choose(shape: Shape, device: Device) -> Tiling:
    """Kernel, tile and grid.

    Raises:
        UnifiedBufferError: nothing fits an Ascend chip's Unified Buffer.
    """
    return cuda.choose(shape, device) if device.kind == "cuda" else ascend.choose(shape, device)


def smaller(tiling: Tiling) -> Tiling | None:
    """The next smaller tiling for an Ascend compiler that needs more Unified Buffer than was declared; None at the end."""
    return ascend.smaller(tiling) if isinstance(tiling, AscendTiling) else None


def of_qkv(tiling: Tiling) -> Tiling:
    """The tiling of a backward of q, k and v in one launch on CUDA, from that for q."""
    assert isinstance(tiling, CudaTiling)
    return cuda.of_qkv(tiling)
