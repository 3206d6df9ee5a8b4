"""From chunks of logits to kernel launches."""

from __future__ import annotations

import functools

import torch
from npu_tiling import Device, Kernels, LaunchSpec, launch_with_fallback
from torch import Tensor

from . import rows as rowwise
from . import tiling
from .chunks import part
from .options import Options

KERNELS = Kernels(__package__, "npu-fused-linear-cross-entropy")


class KernelBackend:
    """What `reference.Reference` does, in Triton: statistics and gradients of chunks of raw logits [rows, columns]."""

    fused = True  # statistics and gradient in one pass, `both`

    def __init__(self, bias: Tensor | None, class_weight: Tensor | None, options: Options, device: Device) -> None:
        self._bias = bias
        self._class_weight = class_weight
        self._options = options
        self._device = device

    def prepare(self, logits: Tensor, columns: slice) -> None:
        """Nothing: kernels read raw products."""

    def statistics(self, logits: Tensor, columns: slice, target: Tensor, first: int, result: Tensor, merge: bool) -> None:
        """Writes statistics [6, rows]; `merge`: together with those of earlier columns, which `result` has."""
        self._launch(logits, None, columns, target, first, None, None, result, merge)

    def keep(
        self,
        logits: Tensor,
        kept: Tensor,
        columns: slice,
        target: Tensor,
        first: int,
        result: Tensor,
        largest: Tensor,
        merge: bool,
    ) -> None:
        """Statistics as `statistics` has them; the largest [rows] so far; and the logits less those, in other memory."""
        self._launch(logits, kept, columns, target, first, None, None, result, merge)
        largest.copy_(result[rowwise.MAXIMUM])

    def gradient(
        self, logits: Tensor, gradient: Tensor, columns: slice, target: Tensor, first: int, coefficients: Tensor
    ) -> None:
        """Writes the gradient of the logits, which may share their memory, given coefficients [5, rows]."""
        self._launch(logits, gradient, columns, target, first, None, coefficients, None, False)

    def both(
        self, logits: Tensor, gradient: Tensor, columns: slice, target: Tensor, first: int, factors: Tensor, result: Tensor
    ) -> None:
        """Writes statistics [6, rows] of whole rows, and the gradient of the loss that they give, times `factors`."""
        self._launch(logits, gradient, columns, target, first, factors, None, result, False)

    def _launch(
        self,
        logits: Tensor,
        gradient: Tensor | None,
        columns: slice,
        target: Tensor,
        first: int,
        factors: Tensor | None,
        coefficients: Tensor | None,
        statistics: Tensor | None,
        merge: bool,
    ) -> None:
        options = self._options
        bias = None if self._bias is None else part(self._bias, columns)
        weighted = options.smoothed or (factors is not None and self._class_weight is not None)
        class_weight = part(self._class_weight, columns) if weighted and self._class_weight is not None else None
        tensors = (logits, gradient, target, bias, class_weight, factors, coefficients, statistics)
        dtypes = tuple([None if tensor is None else tensor.dtype for tensor in tensors])
        spec = choose_spec(logits.shape[1], dtypes, options, merge, self._device)
        rows_apart = statistics if statistics is not None else coefficients
        assert rows_apart is not None
        scalars = (
            logits.shape[0],
            logits.stride(0),
            0 if gradient is None else gradient.stride(0),
            rows_apart.stride(0),
            first,
            options.logit_scale,
            1.0 if options.softcap is None else options.softcap,
            options.label_smoothing,
            options.lse_square_scale,
        )

        def run(spec: LaunchSpec) -> None:
            KERNELS.launch("kernels", "cross_entropy_kernel", spec, spec.launch.grid(logits.shape[0]), tensors, scalars)

        launch_with_fallback("cross_entropy", spec, run, _smaller)


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
        "KEEP": gradient is not None and statistics is not None and factors is None,
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


def scale_(values: Tensor, factor: Tensor, device: Device) -> None:
    """values *= factor, a number on the device, in place; values are contiguous. Costs one small launch where it is 1."""
    n = values.numel()
    if n:
        spec = _scale_spec(values.itemsize, device)
        KERNELS.launch("kernels", "cross_entropy_scale_kernel", spec, spec.launch.grid(n), (values, factor), (n,))


@functools.lru_cache(maxsize=64)
def _scale_spec(itemsize: int, device: Device) -> LaunchSpec:
    return LaunchSpec.of(tiling.scale_launch(itemsize, device), {})


def _smaller(spec: LaunchSpec) -> LaunchSpec | None:
    return spec.smaller(tiling.smaller)
