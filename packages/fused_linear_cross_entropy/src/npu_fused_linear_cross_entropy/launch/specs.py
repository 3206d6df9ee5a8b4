"""The launches over chunks of logits, by their width, dtypes and options: chosen once, then looked up."""

from __future__ import annotations

import functools

import torch
from npu_tiling import Device, LaunchSpec

from .. import tiling
from ..options import Options


@functools.lru_cache(maxsize=1024)
def statistics(width: int, logits: torch.dtype, biased: bool, options: Options, merge: bool, device: Device) -> LaunchSpec:
    """Statistics alone."""
    flags = {
        "MERGE": merge,
        "SMOOTHED": options.smoothed,
        "ENTROPY": options.return_entropy,
        "ARGMAX": options.argmax,
        **_transform(options),
    }
    problem = tiling.Problem(
        width, logits.itemsize, 0, True, options.smoothed, options.return_entropy, options.argmax, _changes(biased, options)
    )
    return LaunchSpec.of(tiling.chunk_launch(problem, device), flags)


@functools.lru_cache(maxsize=1024)
def gradient(
    width: int, dtypes: tuple[torch.dtype, torch.dtype], biased: bool, options: Options, device: Device
) -> LaunchSpec:
    """The gradient alone; dtypes of the logits and of their gradient."""
    flags = {"SMOOTHED": options.smoothed, "ENTROPY": options.return_entropy, **_transform(options)}
    smoothed, entropy, changes = options.smoothed, options.return_entropy, _changes(biased, options)
    problem = tiling.Problem(width, *_sizes(dtypes), False, smoothed, entropy, transformed=changes)
    return LaunchSpec.of(tiling.chunk_launch(problem, device), flags)


@functools.lru_cache(maxsize=1024)
def both(width: int, dtypes: tuple[torch.dtype, torch.dtype], biased: bool, options: Options, device: Device) -> LaunchSpec:
    """Statistics and gradient of whole rows, in two sweeps where a row is more than a tile; dtypes as above."""
    flags = {
        "SMOOTHED": options.smoothed,
        "Z_LOSS": options.lse_square_scale != 0.0,
        "TOKEN_SCALING": options.token_scaling,
        "ARGMAX": options.argmax,
        **_transform(options),
    }
    smoothed, argmax, changes = options.smoothed, options.argmax, _changes(biased, options)
    problem = tiling.Problem(width, *_sizes(dtypes), True, smoothed, False, argmax, changes)
    return LaunchSpec.of(tiling.chunk_launch(problem, device), flags)


@functools.lru_cache(maxsize=1024)
def keep(
    width: int, dtypes: tuple[torch.dtype, torch.dtype], smoothed: bool, argmax: bool, merge: bool, device: Device
) -> LaunchSpec:
    """The launch for a chunk of `width` columns of logits that are kept; dtypes of the logits and of what is kept."""
    problem = tiling.Problem(width, dtypes[0].itemsize, dtypes[1].itemsize, True, smoothed, argmax=argmax, in_place=False)
    flags = {"MERGE": merge, "SMOOTHED": smoothed, "ARGMAX": argmax}
    return LaunchSpec.of(tiling.chunk_launch(problem, device), flags)


@functools.lru_cache(maxsize=1024)
def one_sweep(
    width: int, dtypes: tuple[torch.dtype, torch.dtype], biased: bool, options: Options, device: Device
) -> LaunchSpec:
    """The launch for whole rows of logits that become exponentials; dtypes of both."""
    problem = _exponentials_problem(width, *dtypes, biased or options.logit_scale != 1.0)
    flags = {
        "Z_LOSS": options.lse_square_scale != 0.0,
        "TOKEN_SCALING": options.token_scaling,
        "SCALED": options.logit_scale != 1.0,
    }
    return LaunchSpec.of(tiling.chunk_launch(problem, device), flags)


@functools.lru_cache(maxsize=1024)
def exponentials(
    width: int, dtypes: tuple[torch.dtype, torch.dtype], biased: bool, scaled: bool, merge: bool, device: Device
) -> LaunchSpec:
    """The launch for columns of logits that become exponentials; dtypes of both."""
    problem = _exponentials_problem(width, *dtypes, biased or scaled)
    return LaunchSpec.of(tiling.chunk_launch(problem, device), {"MERGE": merge, "SCALED": scaled})


@functools.lru_cache(maxsize=64)
def settle(width: int, is_first: bool, scaled: bool, device: Device) -> LaunchSpec:
    """The launch that makes exponentials a gradient."""
    return LaunchSpec.of(tiling.SettleLaunch(width, device), {"FIRST": is_first, "SCALED": scaled})


@functools.lru_cache(maxsize=256)
def scale_rows(width: int, device: Device) -> LaunchSpec:
    """Rows times a number each."""
    return LaunchSpec.of(tiling.ScaleRowsLaunch(width, device), {})


def _exponentials_problem(width: int, logits: torch.dtype, exponentials: torch.dtype, transformed: bool) -> tiling.Problem:
    """What a tiling is made for."""
    return tiling.Problem(width, logits.itemsize, exponentials.itemsize, True, transformed=transformed, exponentials=True)


def _transform(options: Options) -> dict[str, bool]:
    return {"SCALED": options.logit_scale != 1.0, "SOFTCAP": options.softcap is not None}


def _changes(biased: bool, options: Options) -> bool:
    """Whether logits are biased, scaled or softcapped."""
    return biased or options.logit_scale != 1.0 or options.softcap is not None


def _sizes(dtypes: tuple[torch.dtype, torch.dtype]) -> tuple[int, int]:
    return dtypes[0].itemsize, dtypes[1].itemsize
