"""From chunks of logits to launches of the kernels of distributions."""

from __future__ import annotations

import functools

import torch
from npu_tiling import Device, LaunchSpec
from torch import Tensor

from .. import tiling
from ..both.tiling.chunks import ChunkKernel
from ..options import Options
from . import specs
from .chunk import KERNELS


class DistributionKernels:
    """`reference.distributions.ReferenceDistributions` in Triton."""

    def __init__(self, options: Options, device: Device) -> None:
        self._options, self._device = options, device
        self._numbers = options.logit_scale, 1.0 if options.softcap is None else options.softcap

    def statistics(self, logits: Tensor, rates: Tensor | None, result: Tensor, *, merge: bool) -> None:
        """Writes statistics [5, rows]; `merge`: merged with the statistics of earlier columns in `result`."""
        strides = logits.stride(0), result.stride(0)
        self._launch(ChunkKernel.DISTRIBUTIONS, logits, None, (logits, rates, result), strides, merge)

    def gradient(
        self, logits: Tensor, rates: Tensor | None, gradient: Tensor, coefficients: Tensor, dots: Tensor | None
    ) -> None:
        """Writes the gradient of raw logits but for ids, which may share their memory, given coefficients [6, rows].

        Args:
            dots: [rows], gets the sum of (z - k) times the gradient of z.
        """
        tensors = (logits, rates, gradient, coefficients, dots)
        strides = logits.stride(0), gradient.stride(0), coefficients.stride(0)
        self._launch(ChunkKernel.DISTRIBUTION_GRADIENT, logits, gradient, tensors, strides)

    def _launch(
        self,
        kernel: ChunkKernel,
        logits: Tensor,
        written: Tensor | None,
        tensors: tuple[Tensor | None, ...],
        strides: tuple[int, ...],
        merge: bool | None = None,
    ) -> None:
        (rows, width), (function, module, *_) = logits.shape, kernel.value
        dtype = None if written is None else written.dtype
        spec = _spec(kernel, width, logits.dtype, dtype, merge, self._options, self._device)
        KERNELS.launch_rows(module, function, spec, rows, tensors, (rows, *strides, *self._numbers), tiling.smaller)


@functools.lru_cache(maxsize=1024)
def _spec(
    kernel: ChunkKernel,
    width: int,
    logits: torch.dtype,
    written: torch.dtype | None,
    merge: bool | None,
    options: Options,
    device: Device,
) -> LaunchSpec:
    """A launch over a chunk of `width` logits; `merge`: the statistics are merged with earlier columns'."""
    flags = {"SCALED": options.logit_scale != 1.0, "SOFTCAP": options.softcap is not None}
    flags = flags if merge is None else {"MERGE": merge, **flags}
    return specs.of_chunk(kernel, width, logits, written, flags, device, smoothed=True, entropy=True, transformed=True)
