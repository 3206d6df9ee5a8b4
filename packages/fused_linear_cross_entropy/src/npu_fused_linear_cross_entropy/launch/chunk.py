"""From chunks of logits to kernel launches."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from npu_tiling import Device, Kernels, LaunchSpec, launch_with_fallback
from torch import Tensor

from .. import tiling
from ..chunks import Chunk, part
from ..options import Options
from . import specs

_ONE_SWEEP, _TWO_SWEEPS = "kernels.one_sweep", "kernels.chunk"
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
        options, logits = self._options, chunk.logits
        bias, class_weight = self._columns(self._bias, chunk), self._columns(self._class_weight, chunk)
        tensors = (logits, chunk.target, bias, class_weight if options.smoothed else None, result)
        scalars = (logits.shape[0], logits.stride(0), result.stride(0), chunk.first, options.logit_scale, _softcap(options))
        spec = specs.statistics(logits.shape[1], logits.dtype, bias is not None, options, merge, self._device)
        _launch_rows("cross_entropy_statistics", _TWO_SWEEPS, spec, tensors, scalars)

    def keep(self, chunk: Chunk, kept: Tensor, result: Tensor, largest: Tensor, merge: bool) -> None:
        """Statistics as `statistics` has them; the largest [rows] so far; and the logits less those, in other memory."""
        options, logits = self._options, chunk.logits
        class_weight = self._columns(self._class_weight, chunk) if options.smoothed else None
        tensors = (logits, kept, chunk.target, class_weight, result, largest)
        scalars = (logits.shape[0], logits.stride(0), kept.stride(0), result.stride(0), chunk.first)
        dtypes = logits.dtype, kept.dtype
        spec = specs.keep(logits.shape[1], dtypes, options.smoothed, options.argmax, merge, self._device)
        _launch_rows("cross_entropy_keep", "kernels.keep", spec, tensors, scalars)

    def gradient(self, chunk: Chunk, gradient: Tensor, coefficients: Tensor) -> None:
        """Writes the gradient of the logits, which may share their memory, given coefficients [5, rows]."""
        options, logits = self._options, chunk.logits
        bias, class_weight = self._columns(self._bias, chunk), self._columns(self._class_weight, chunk)
        tensors = (logits, gradient, chunk.target, bias, class_weight if options.smoothed else None, coefficients)
        scalars = (*_sizes(chunk, gradient, coefficients), options.logit_scale, _softcap(options))
        dtypes = logits.dtype, gradient.dtype
        spec = specs.gradient(logits.shape[1], dtypes, bias is not None, options, self._device)
        _launch_rows("cross_entropy_gradient", _TWO_SWEEPS, spec, tensors, scalars)

    def both(self, chunk: Chunk, gradient: Tensor, factors: Tensor, result: Tensor) -> None:
        """Writes statistics [6, rows] of whole rows, and the gradient of the loss that they give, times `factors`."""
        options = self._options
        tensors = (chunk.logits, gradient, chunk.target, self._bias, self._class_weight, factors, result)
        sizes = _sizes(chunk, gradient, result)
        scalars = (*sizes, options.logit_scale, _softcap(options), options.label_smoothing, options.lse_square_scale)
        dtypes = chunk.logits.dtype, gradient.dtype
        spec = specs.both(chunk.logits.shape[1], dtypes, self._bias is not None, options, self._device)
        _launch_rows("cross_entropy", _TWO_SWEEPS, spec, tensors, scalars)

    def both_in_one_sweep(self, chunk: Chunk, exponentials: Tensor, factors: Tensor, result: Tensor, v: Tensor) -> None:
        """Writes statistics of whole rows, and exponentials that are the gradient of `both` if multiplied by v [rows]."""
        options, class_weight = self._options, self._class_weight
        tensors = (chunk.logits, exponentials, chunk.target, self._bias, class_weight, factors, result, v)
        scalars = (*_sizes(chunk, exponentials, result), options.logit_scale, options.lse_square_scale)
        dtypes = chunk.logits.dtype, exponentials.dtype
        spec = specs.one_sweep(chunk.logits.shape[1], dtypes, self._bias is not None, options, self._device)
        _launch_rows("cross_entropy_one_sweep", _ONE_SWEEP, spec, tensors, scalars)

    def exponentials(self, chunk: Chunk, exponentials: Tensor, result: Tensor, reference: Tensor, merge: bool) -> None:
        """Statistics as `statistics` has them, and exponentials of the logits less a reference [rows], in any memory."""
        bias = self._columns(self._bias, chunk)
        tensors = (chunk.logits, exponentials, chunk.target, bias, result, reference)
        scalars = (*_sizes(chunk, exponentials, result), self._options.logit_scale)
        scaled = self._options.logit_scale != 1.0
        dtypes = chunk.logits.dtype, exponentials.dtype
        spec = specs.exponentials(chunk.logits.shape[1], dtypes, bias is not None, scaled, merge, self._device)
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
        spec = specs.settle(width, chunk.columns.start == 0, self._options.logit_scale != 1.0, self._device)
        KERNELS.launch(_ONE_SWEEP, "cross_entropy_settle_kernel", spec, spec.launch.grid(rows), tensors, scalars)

    def _columns(self, vector: Tensor | None, chunk: Chunk) -> Tensor | None:
        """The part of a vector over the vocabulary that belongs to a chunk."""
        return None if vector is None else part(vector, chunk.columns)


def _softcap(options: Options) -> float:
    return 1.0 if options.softcap is None else options.softcap


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


def scale_(values: Tensor, factor: Tensor, device: Device) -> None:
    """values *= factor, a number on the device, in place; values are contiguous. Costs one small launch where it is 1."""
    n = values.numel()
    if n:
        spec = _scale_spec(values.itemsize, device)
        grid = spec.launch.grid(n)
        KERNELS.launch("kernels.scale", "cross_entropy_scale_kernel", spec, grid, (values, factor), (n,))


@functools.lru_cache(maxsize=64)
def _scale_spec(itemsize: int, device: Device) -> LaunchSpec:
    return LaunchSpec.of(tiling.scale_launch(itemsize, device), {})


def scale_rows(values: Tensor, factors: Tensor, out: Tensor, device: Device) -> None:
    """out = values [rows, N] times factors [rows]; out may be the values. PyTorch's product is slow where dtypes differ."""
    rows, width = values.shape
    if rows:
        spec = specs.scale_rows(width, device)
        grid, scalars = spec.launch.grid(rows), (rows, values.stride(0), out.stride(0))
        KERNELS.launch("kernels.scale", "cross_entropy_scale_rows_kernel", spec, grid, (values, factors, out), scalars)
