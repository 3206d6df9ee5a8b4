"""From chunks of logits to kernel launches."""

from __future__ import annotations

from collections.abc import Sequence

from npu_tiling import Device, Kernels, device_for
from torch import Tensor

from .. import tiling
from ..both.tiling.chunks import ChunkKernel
from ..chunks import Chunk, part
from ..options import Options
from ..rows import TargetFacts, TargetGradients
from . import specs

KERNELS = Kernels(__package__.rpartition(".")[0], "npu-fused-linear-cross-entropy")


class ChunkKernels:
    """`reference.chunks.ReferenceChunks` in Triton: statistics and gradients of chunks of raw logits."""

    def __init__(self, bias: Tensor | None, class_weight: Tensor | None, options: Options, device: Device) -> None:
        self._bias = bias
        self._class_weight = class_weight
        self._options = options
        self._softcap = 1.0 if options.softcap is None else options.softcap
        self._device = device

    def prepare(self, logits: Tensor, columns: slice) -> None:
        """Nothing: kernels read raw products."""

    def statistics(self, chunk: Chunk, result: Tensor, *, merge: bool) -> None:
        """Writes statistics [7, rows]; `merge`: merged with the statistics of earlier columns in `result`."""
        logits, bias = chunk.logits, part(self._bias, chunk.columns)
        tensors = (logits, chunk.target, bias, self._smoothing_weight(chunk), result)
        sizes = (logits.shape[0], logits.stride(0), result.stride(0), chunk.first)
        self._launch(ChunkKernel.STATISTICS, chunk, None, tensors, (*sizes, self._options.logit_scale, self._softcap), merge)

    def keep(self, chunk: Chunk, kept: Tensor, result: Tensor, largest: Tensor, *, merge: bool) -> None:
        """Writes statistics as `statistics` does, the row maxima so far, [rows], and elsewhere the logits minus these."""
        tensors = (chunk.logits, kept, chunk.target, self._smoothing_weight(chunk), result, largest)
        self._launch(ChunkKernel.KEEP, chunk, kept, tensors, _sizes(chunk, kept, result), merge)

    def gradient(self, chunk: Chunk, gradient: Tensor, coefficients: Tensor) -> None:
        """Writes the gradient of the logits, which may share their memory, given coefficients [5, rows]."""
        bias = part(self._bias, chunk.columns)
        tensors = (chunk.logits, gradient, chunk.target, bias, self._smoothing_weight(chunk), coefficients)
        scalars = (*_sizes(chunk, gradient, coefficients), self._options.logit_scale, self._softcap)
        self._launch(ChunkKernel.GRADIENT, chunk, gradient, tensors, scalars)

    def statistics_and_gradient(self, chunk: Chunk, gradient: Tensor, facts: TargetFacts, result: Tensor) -> None:
        """Writes statistics [7, rows] of whole rows, and the gradient of the one loss that they give."""
        options, factors = self._options, facts.gradient_factors
        tensors = (chunk.logits, gradient, chunk.target, self._bias, self._class_weight, factors, result)
        numbers = (options.logit_scale, self._softcap, options.label_smoothing, options.lse_square_scale)
        self._launch(ChunkKernel.BOTH, chunk, gradient, tensors, (*_sizes(chunk, gradient, result), *numbers))

    def exponentials(self, chunk: Chunk, exponentials: Tensor, result: Tensor, reference: Tensor, *, merge: bool) -> None:
        """Writes statistics as `statistics` does, E = exp(z - k) in any memory, and k [rows] as `reference`."""
        tensors = (chunk.logits, exponentials, chunk.target, part(self._bias, chunk.columns), result, reference)
        scalars = (*_sizes(chunk, exponentials, result), self._options.logit_scale)
        self._launch(ChunkKernel.EXPONENTIALS, chunk, exponentials, tensors, scalars, merge)

    def settle(
        self,
        chunk: Chunk,
        reference: Tensor,
        last: Tensor,
        target_logit: Tensor,
        coefficients: Tensor,
        v: Tensor,
        targets: TargetGradients,
    ) -> None:
        """Ends E, which is in chunk.logits: zeros at targets; writes v [rows] and g. See formula.py.

        Args:
            reference: [rows], k of this E.
            last: [rows], the final k.
            target_logit: [rows].
            coefficients: [5, rows].
        """
        tensors = (chunk.logits, chunk.target, target_logit, reference, last, coefficients, v, targets.values)
        rows, width = chunk.logits.shape
        scalars = (rows, chunk.logits.stride(0), coefficients.stride(0), chunk.first, self._options.logit_scale)
        is_first, scaled = chunk.columns.start == 0, self._options.logit_scale != 1.0
        spec = specs.settle(width, is_first, scaled, self._device)
        KERNELS.launch("both.one_sweep", "cross_entropy_settle_kernel", spec, spec.launch.grid(rows), tensors, scalars)

    def _smoothing_weight(self, chunk: Chunk) -> Tensor | None:
        """The class weights of a chunk's columns, where smoothing needs them."""
        return part(self._class_weight, chunk.columns) if self._options.smoothed else None

    def _launch(
        self,
        kernel: ChunkKernel,
        chunk: Chunk,
        written: Tensor | None,
        tensors: Sequence[Tensor | None],
        scalars: tuple[float, ...],
        merge: bool = False,
    ) -> None:
        """Launches a kernel whose first scalar is the number of rows."""
        logits, (function, module, *_) = chunk.logits, kernel.value
        dtype, given = None if written is None else written.dtype, (self._bias is not None, self._class_weight is not None)
        spec = specs.chunk(kernel, logits.shape[1], logits.dtype, dtype, *given, merge, self._options, self._device)
        KERNELS.launch_rows(module, function, spec, logits.shape[0], tensors, scalars, tiling.smaller)


def _sizes(chunk: Chunk, written: Tensor, statistics: Tensor) -> tuple[int, ...]:
    rows = chunk.logits.shape[0]
    return rows, chunk.logits.stride(0), written.stride(0), statistics.stride(0), chunk.first


def scale(values: Tensor, factor: Tensor, out: Tensor, device: Device) -> None:
    """out = values times a factor, a number on the device. If out is the values and the factor 1, they are not touched.

    Both are contiguous.
    """
    assert values.is_contiguous() and out.is_contiguous()
    n = values.numel()
    if n:
        spec, tensors = specs.scale(values.itemsize, device), (values, factor, None if out is values else out)
        KERNELS.launch("both.scale", "cross_entropy_scale_kernel", spec, spec.launch.grid(n), tensors, (n,))


def scale_rows(
    values: Tensor, factors: Tensor, out: Tensor, targets: TargetGradients | None = None, weight: Tensor | None = None
) -> None:
    """out = factors [rows] values [rows, N] + g W[target], W the weight [V, N]; without targets the product alone.

    out may be the values. torch.mul is slow where dtypes differ.
    """
    (rows, width), device = values.shape, device_for(factors.device)
    assert device is not None
    if rows:
        spec = specs.scale_rows(width, device)
        added: tuple[Tensor | None, ...] = (None, None, None)
        place: tuple[int, ...] = (0, 0, 1)
        if targets is not None:
            assert weight is not None
            added, place = (targets.values, targets.columns, weight), (targets.first, *weight.stride())
        tensors, scalars = (values, factors, out, *added), (rows, values.stride(0), out.stride(0), *place)
        KERNELS.launch("both.scale", "cross_entropy_scale_rows_kernel", spec, spec.launch.grid(rows), tensors, scalars)
