"""The launches over chunks of logits, by their width, dtypes and options: chosen once, then looked up."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from npu_tiling import Device, LaunchSpec

from .. import tiling
from ..both.tiling.chunks import ChunkKernel, ChunkShape
from ..both.tiling.scaling import ScaleLaunch, ScaleRowsLaunch, SettleLaunch
from ..options import Options


@functools.lru_cache(maxsize=4096)
def chunk(
    kernel: ChunkKernel,
    width: int,
    logits: torch.dtype,
    written: torch.dtype | None,
    biased: bool,
    weighted: bool,
    merge: bool,
    options: Options,
    device: Device,
) -> LaunchSpec:
    """A launch over a chunk of `width` logits.

    Args:
        logits, written: dtypes of the logits and of the numbers written for them; None where none are written.
        biased: whether a bias is added to logits.
        weighted: whether there are class weights.
        merge: whether the statistics are merged with those of earlier columns.
    """
    scaled, capped = options.logit_scale != 1.0, options.softcap is not None
    statistics = {"SMOOTHED": options.smoothed, "ARGMAX": options.argmax}
    transform = {"SCALED": scaled, "SOFTCAP": capped}
    flags = {
        ChunkKernel.STATISTICS: {"MERGE": merge, "ENTROPY": options.return_entropy, **statistics, **transform},
        ChunkKernel.GRADIENT: {"SMOOTHED": options.smoothed, "ENTROPY": options.return_entropy, **transform},
        ChunkKernel.BOTH: {
            "Z_LOSS": options.lse_square_scale != 0.0,
            "TOKEN_SCALING": options.token_scaling,
            **statistics,
            **transform,
        },
        ChunkKernel.KEEP: {"MERGE": merge, **statistics},
        ChunkKernel.EXPONENTIALS: {"MERGE": merge, "SCALED": scaled},
    }
    kept = {
        "smoothed": options.smoothed,
        "weighted": options.smoothed and weighted,
        "entropy": options.return_entropy,
        "argmax": options.argmax and kernel is not ChunkKernel.GRADIENT,
        "transformed": biased or scaled or capped,
    }
    return of_chunk(kernel, width, logits, written, flags[kernel], device, **kept)


def of_chunk(
    kernel: ChunkKernel,
    width: int,
    logits: torch.dtype,
    written: torch.dtype | None,
    flags: Mapping[str, object],
    device: Device,
    **kept: bool,
) -> LaunchSpec:
    """A launch with its flags; `kept`: the options of its `ChunkShape`."""
    written_itemsize = 0 if written is None else written.itemsize
    shape = ChunkShape(kernel=kernel, width=width, itemsize=logits.itemsize, written_itemsize=written_itemsize, **kept)
    return LaunchSpec.of(tiling.chunk_launch(shape, device), flags)


@functools.lru_cache(maxsize=64)
def settle(width: int, is_first: bool, scaled: bool, device: Device) -> LaunchSpec:
    """The launch that scales exponentials and sets those of targets to 0."""
    return LaunchSpec.of(SettleLaunch(width=width, device=device), {"FIRST": is_first, "SCALED": scaled})


@functools.lru_cache(maxsize=256)
def scale_rows(width: int, device: Device) -> LaunchSpec:
    """Rows times a number each."""
    return LaunchSpec.of(ScaleRowsLaunch(width=width, device=device), {})


@functools.lru_cache(maxsize=64)
def scale(itemsize: int, device: Device) -> LaunchSpec:
    """Values times one number."""
    return LaunchSpec.of(ScaleLaunch(itemsize=itemsize, device=device), {})
