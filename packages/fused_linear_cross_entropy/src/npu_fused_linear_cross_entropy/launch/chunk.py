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

_ONE_SWEEP = "kernels.one_sweep"
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

    def both_in_one_sweep(self, chunk: Chunk, exponentials: Tensor, factors: Tensor, result: Tensor, v: Tensor) -> None:
        """Writes statistics of whole rows, and exponentials that are the gradient of `both` if multiplied by v [rows]."""
        options, class_weight = self._options, self._class_weight
        tensors = (chunk.logits, exponentials, chunk.target, self._bias, class_weight, factors, result, v)
        scalars = (*_sizes(chunk, exponentials, result), options.logit_scale, options.lse_square_scale)
        dtypes = chunk.logits.dtype, exponentials.dtype
        spec = choose_one_sweep_spec(chunk.logits.shape[1], dtypes, self._bias is not None, options, self._device)
        _launch_rows("cross_entropy_one_sweep", _ONE_SWEEP, spec, tensors, scalars)

    def exponentials(self, chunk: Chunk, exponentials: Tensor, result: Tensor, reference: Tensor, merge: bool) -> None:
        """Statistics as `statistics` has them, and exponentials of the logits less a reference [rows], in any memory."""
        bias = None if self._bias is None else part(self._bias, chunk.columns)
        tensors = (chunk.logits, exponentials, chunk.target, bias, result, reference)
        scalars = (*_sizes(chunk, exponentials, result), self._options.logit_scale)
        scaled = self._options.logit_scale != 1.0
        dtypes = chunk.logits.dtype, exponentials.dtype
        spec = choose_exponentials_spec(chunk.logits.shape[1], dtypes, bias is not None, scaled, merge, self._device)
        _launch_rows("cross_entropy_exponentials", _ONE_SWEEP, spec, tensors, scalars)

    def settle(
        self, chunk: Chunk, reference: Tensor, last: Tensor, target_logit: Tensor, coefficients: Tensor, v: Tensor
    ) -> None:
        """Makes exponentials, which are the chunk's logits, the gradient if multiplied by v [rows], which it writes.

        Args:
            reference: [rows], of these exponentials.
            last: [rows], the reference that they are to have.
            target_logit: [rows].
            coefficients: [5, rows].
        """
        tensors = (chunk.logits, chunk.target, target_logit, reference, last, coefficients, v)
        rows, width = chunk.logits.shape
        scalars = (rows, chunk.logits.stride(0), coefficients.stride(0), chunk.first, self._options.logit_scale)
        spec = choose_settle_spec(width, chunk.columns.start == 0, self._options.logit_scale != 1.0, self._device)
        KERNELS.launch(_ONE_SWEEP, "cross_entropy_settle_kernel", spec, spec.launch.grid(rows), tensors, scalars)

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


def _sizes(chunk: Chunk, written: Tensor, statistics: Tensor) -> tuple[int, ...]:
    rows = chunk.logits.shape[0]
    return rows, chunk.logits.stride(0), written.stride(0), statistics.stride(0), chunk.first


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


@functools.lru_cache(maxsize=1024)
def choose_one_sweep_spec(
    width: int, dtypes: tuple[torch.dtype, torch.dtype], biased: bool, options: Options, device: Device
) -> LaunchSpec:
    """The launch for whole rows of logits that become exponentials; dtypes of both."""
    problem = exponentials_problem(width, *dtypes, biased or options.logit_scale != 1.0)
    flags = {
        "Z_LOSS": options.lse_square_scale != 0.0,
        "TOKEN_SCALING": options.token_scaling,
        "SCALED": options.logit_scale != 1.0,
    }
    return LaunchSpec.of(tiling.chunk_launch(problem, device), flags)


@functools.lru_cache(maxsize=1024)
def choose_exponentials_spec(
    width: int, dtypes: tuple[torch.dtype, torch.dtype], biased: bool, scaled: bool, merge: bool, device: Device
) -> LaunchSpec:
    """The launch for columns of logits that become exponentials; dtypes of both."""
    problem = exponentials_problem(width, *dtypes, biased or scaled)
    return LaunchSpec.of(tiling.chunk_launch(problem, device), {"MERGE": merge, "SCALED": scaled})


@functools.lru_cache(maxsize=64)
def choose_settle_spec(width: int, is_first: bool, scaled: bool, device: Device) -> LaunchSpec:
    """The launch that makes exponentials a gradient."""
    return LaunchSpec.of(tiling.SettleLaunch(width, device), {"FIRST": is_first, "SCALED": scaled})


def exponentials_problem(width: int, logits: torch.dtype, exponentials: torch.dtype, transformed: bool) -> tiling.Problem:
    """What a tiling is made for."""
    return tiling.Problem(width, logits.itemsize, exponentials.itemsize, True, transformed=transformed, exponentials=True)


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
