"""From chunks of logits to kernel launches."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from npu_tiling import Device, Kernels, LaunchSpec, launch_with_fallback
from torch import Tensor

from .. import tiling
from ..chunks import Chunk, part
from ..options import Options

KERNELS = Kernels(__package__.rpartition(".")[0], "npu-fused-linear-cross-entropy")


class KernelBackend:
    """What `reference.Reference` does, in Triton: statistics and gradients of chunks of raw logits."""

    def __init__(self, bias: Tensor | None, class_weight: Tensor | None, options: Options, device: Device) -> None:
        self._bias = bias
        self._class_weight = class_weight
        self._options = options
        self._device = device

    def prepare(self, logits: Tensor, columns: slice) -> None:
        """Nothing: kernels read raw products."""

    def statistics(self, chunk: Chunk, result: Tensor, merge: bool) -> None:
        """Writes statistics [6, rows]; `merge`: together with those of earlier columns, which `result` has."""
        self._launch(chunk, None, None, None, result, merge)

    def keep(self, chunk: Chunk, kept: Tensor, result: Tensor, largest: Tensor, merge: bool) -> None:
        """Statistics as `statistics` has them; the largest [rows] so far; and the logits less those, in other memory."""
        options, logits = self._options, chunk.logits
        class_weight = None
        if options.smoothed and self._class_weight is not None:
            class_weight = part(self._class_weight, chunk.columns)
        tensors = (logits, kept, chunk.target, class_weight, result, largest)
        scalars = (logits.shape[0], logits.stride(0), kept.stride(0), result.stride(0), chunk.first)
        dtypes = logits.dtype, kept.dtype
        spec = choose_keep_spec(logits.shape[1], dtypes, options.smoothed, options.argmax, merge, self._device)
        _launch_rows("cross_entropy_keep", "kernels.keep", spec, tensors, scalars)

    def gradient(self, chunk: Chunk, gradient: Tensor, coefficients: Tensor) -> None:
        """Writes the gradient of the logits, which may share their memory, given coefficients [5, rows]."""
        self._launch(chunk, gradient, None, coefficients, None, False)

    def both(self, chunk: Chunk, gradient: Tensor, factors: Tensor, result: Tensor) -> None:
        """Writes statistics [6, rows] of whole rows, and the gradient of the loss that they give, times `factors`."""
        self._launch(chunk, gradient, factors, None, result, False)

    def _launch(
        self,
        chunk: Chunk,
        gradient: Tensor | None,
        factors: Tensor | None,
        coefficients: Tensor | None,
        statistics: Tensor | None,
        merge: bool,
    ) -> None:
        options, logits = self._options, chunk.logits
        bias = None if self._bias is None else part(self._bias, chunk.columns)
        class_weight = None
        if self._class_weight is not None and (options.smoothed or factors is not None):
            class_weight = part(self._class_weight, chunk.columns)
        tensors = (logits, gradient, chunk.target, bias, class_weight, factors, coefficients, statistics)
        dtypes = tuple([None if tensor is None else tensor.dtype for tensor in tensors])
        rows_apart = statistics if statistics is not None else coefficients
        assert rows_apart is not None
        scalars = (
            logits.shape[0],
            logits.stride(0),
            0 if gradient is None else gradient.stride(0),
            rows_apart.stride(0),
            chunk.first,
            options.logit_scale,
            1.0 if options.softcap is None else options.softcap,
            options.label_smoothing,
            options.lse_square_scale,
        )
        spec = choose_spec(logits.shape[1], dtypes, options, merge, self._device)
        _launch_rows("cross_entropy", "kernels.chunk", spec, tensors, scalars)


def _launch_rows(
    name: str, module: str, spec: LaunchSpec, tensors: Sequence[Tensor | None], scalars: tuple[float, ...]
) -> None:
    """Launches a kernel, {name}_kernel, whose first scalar is the number of rows."""
    rows = int(scalars[0])

    def run(spec: LaunchSpec) -> None:
        KERNELS.launch(module, f"{name}_kernel", spec, spec.launch.grid(rows), tensors, scalars)

    launch_with_fallback(name, spec, run, tiling.smaller)


@functools.lru_cache(maxsize=1024)
def choose_spec(
    width: int, dtypes: tuple[torch.dtype | None, ...], options: Options, merge: bool, device: Device
) -> LaunchSpec:
    """The launch for a chunk of `width` columns and tensors of these dtypes, in the kernel's order."""
    logits, gradient, _, bias, _, factors, _, statistics = dtypes
    assert logits is not None
    flags = {
        "STATISTICS": statistics is not None,
        "MERGE": merge,
        "GRADIENT": gradient is not None,
        "SMOOTHED": options.smoothed,
        "Z_LOSS": options.lse_square_scale != 0.0 and factors is not None,
        "TOKEN_SCALING": options.token_scaling and factors is not None,
        "ENTROPY": options.return_entropy,
        "ARGMAX": options.argmax and statistics is not None,
        "SCALED": options.logit_scale != 1.0,
        "SOFTCAP": options.softcap is not None,
    }
    problem = tiling.Problem(
        width,
        logits.itemsize,
        0 if gradient is None else gradient.itemsize,
        flags["STATISTICS"],
        flags["SMOOTHED"],
        flags["ENTROPY"],
        flags["ARGMAX"],
        flags["SCALED"] or flags["SOFTCAP"] or bias is not None,
    )
    return LaunchSpec.of(tiling.chunk_launch(problem, device), flags)


@functools.lru_cache(maxsize=1024)
def choose_keep_spec(
    width: int, dtypes: tuple[torch.dtype, torch.dtype], smoothed: bool, argmax: bool, merge: bool, device: Device
) -> LaunchSpec:
    """The launch for a chunk of `width` columns of logits that are kept; dtypes of the logits and of what is kept."""
    problem = tiling.Problem(width, dtypes[0].itemsize, dtypes[1].itemsize, True, smoothed, argmax=argmax, in_place=False)
    flags = {"MERGE": merge, "SMOOTHED": smoothed, "ARGMAX": argmax}
    return LaunchSpec.of(tiling.chunk_launch(problem, device), flags)


def scale_(values: Tensor, factor: Tensor, device: Device) -> None:
    """values *= factor, a number on the device, in place; values are contiguous. Costs one small launch where it is 1."""
    n = values.numel()
    if n:
        spec = _scale_spec(values.itemsize, device)
        grid = spec.launch.grid(n)
        KERNELS.launch("kernels.chunk", "cross_entropy_scale_kernel", spec, grid, (values, factor), (n,))


@functools.lru_cache(maxsize=64)
def _scale_spec(itemsize: int, device: Device) -> LaunchSpec:
    return LaunchSpec.of(tiling.scale_launch(itemsize, device), {})
