"""From vectors of [tokens] to kernel launches. Definitions: reference/rows.py."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from npu_tiling import Device, LaunchSpec, launch_with_fallback
from npu_tiling.pytorch import collectives
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from ..both.tiling import rows as tiling
from ..both.tiling.rows import RowKernel
from ..options import Options
from ..rows import COEFFICIENTS, LinearCrossEntropyOutput, TargetFacts
from .chunk import KERNELS

_PARTIAL_WIDTH = 8  # numbers of a row of partial sums, and of factors: 32 bytes
_READ = (torch.float32, torch.int64, torch.int32)  # dtypes of a divisor that the kernel reads
_COUNTED = 2**24  # integers below are fp32 numbers


class RowKernels:
    """`target_facts`, `losses`, `coefficients` and `join` of reference/rows.py, a launch each.

    The sums of many rows, or of ranks, are one more.
    """

    def __init__(self, device: Device) -> None:
        self._device = device

    def target_facts(
        self,
        target: Tensor,
        class_weight: Tensor | None,
        divisor: Tensor | None,
        options: Options,
        dtype: torch.dtype,
        dweight_scale: float | None,
    ) -> TargetFacts:
        """See `reference.rows.target_facts`."""
        target, mean = target.contiguous(), options.reduction == "mean"
        if divisor is not None:
            divisor = divisor.to(target.device, divisor.dtype if divisor.dtype in _READ else torch.float32) if mean else None
        class_weight = None if class_weight is None else class_weight.contiguous()
        tokens, weights = target.numel(), 0 if class_weight is None else class_weight.numel()
        columns = allocate(target, (tokens,), torch.int32)
        target_weight = None if class_weight is None else allocate(target, (tokens,), torch.float32)
        factors = allocate(target, (2, _PARTIAL_WIDTH), torch.float32)
        unfinished = None if dweight_scale is None else allocate(target, (3,), torch.float32)
        unscale = 1.0 / (dweight_scale or 1.0)
        kernel = RowKernel.TARGETS if class_weight is None else RowKernel.WEIGHTED_TARGETS
        grid = tiling.row_launch(kernel, self._device).grid(max(tokens, weights if options.smoothed else 0), summed=True)
        exchanged = bool(options.group) and class_weight is not None
        partials = allocate(target, (grid, _PARTIAL_WIDTH), torch.float32) if grid > 1 or exchanged else None
        self._launch(
            kernel,
            grid,
            (target, class_weight, divisor, columns, target_weight, factors, unfinished, partials),
            (tokens, options.ignore_index, options.vocab_size, options.vocab_first, weights, unscale),
            SMALL_INDEX=abs(options.ignore_index) < _COUNTED,
            SMOOTHED=options.smoothed,
            MEAN=mean,
            LAST=partials is None,
        )
        if partials is not None:
            if exchanged:
                assert target_weight is not None
                collectives.sum_(target_weight, options.group)
                partials = partials.sum(0, keepdim=True)
                collectives.sum_(partials[0, 1:4], options.group)
            spec = _partials_spec(self._device, MEAN=mean, WEIGHTED=class_weight is not None)
            tensors, scalars = (partials, divisor, factors, unfinished), (partials.shape[0], unscale)
            KERNELS.launch("both.targets", "cross_entropy_factors_kernel", spec, 1, tensors, scalars)
        of_gradient = factors if unfinished is None else factors[1]
        return TargetFacts(columns, target_weight, factors, of_gradient, unfinished)

    def losses(
        self, facts: TargetFacts, statistics: Tensor, options: Options, shape: torch.Size
    ) -> LinearCrossEntropyOutput:
        """See `reference.rows.losses`."""
        reduced = options.reduction != "none"
        summed = reduced or options.return_token_accuracy
        tokens = statistics.shape[1]
        grid = tiling.row_launch(RowKernel.LOSSES, self._device).grid(tokens, summed=summed)
        partials = allocate(statistics, (grid, _PARTIAL_WIDTH), torch.float32) if summed and grid > 1 else None
        size = () if reduced else shape
        outputs = LinearCrossEntropyOutput(
            allocate(statistics, size, torch.float32),
            allocate(statistics, size, torch.float32) if options.return_z_loss else None,
            allocate(statistics, (), torch.float32) if options.return_token_accuracy else None,
            allocate(statistics, shape, torch.int64) if options.return_predicted_tokens else None,
            allocate(statistics, shape, torch.float32) if options.return_lse else None,
            allocate(statistics, shape, torch.float32) if options.return_entropy else None,
        )
        self._launch(
            RowKernel.LOSSES,
            grid,
            (statistics, facts.columns, facts.target_weight, facts.factors, *outputs, partials),
            (tokens, statistics.stride(0), options.vocab_size, options.label_smoothing, options.lse_square_scale),
            SMOOTHED=options.smoothed,
            Z_LOSS=options.lse_square_scale != 0.0 or options.return_z_loss,
            TOKEN_SCALING=options.token_scaling,
            REDUCED=reduced,
            LAST=partials is None,
        )
        if partials is not None:
            spec = _partials_spec(self._device, REDUCED=reduced)
            tensors = (partials, facts.factors, *outputs[:3])
            KERNELS.launch("both.losses", "cross_entropy_sums_kernel", spec, 1, tensors, (grid,))
        return outputs

    def coefficients(
        self, facts: TargetFacts, statistics: Tensor, options: Options, dloss: Tensor | float | None, dentropy: Tensor | None
    ) -> Tensor:
        """See `reference.rows.coefficients`; q is written only with entropies; a number that is no tensor must be 1."""
        assert not isinstance(dloss, float) or dloss == 1.0
        tokens = statistics.shape[1]
        result = allocate(statistics, (COEFFICIENTS, tokens), torch.float32)
        given = (_dense(dloss) if isinstance(dloss, Tensor) else None, None if dentropy is None else _dense(dentropy))
        self._launch(
            RowKernel.COEFFICIENTS,
            tiling.row_launch(RowKernel.COEFFICIENTS, self._device).grid(tokens, summed=False),
            (statistics, facts.columns, facts.target_weight, facts.gradient_factors, *given, result),
            (tokens, statistics.stride(0), tokens, options.vocab_size, options.label_smoothing, options.lse_square_scale),
            LOSS=dloss is not None,
            EACH_LOSS=given[0] is not None and given[0].dim() > 0,
            ENTROPY=options.return_entropy,
            EACH_ENTROPY=given[1] is not None and given[1].dim() > 0,
            TOKEN_SCALING=options.token_scaling,
        )
        return result

    def join(self, parts: Tensor, statistics: Tensor) -> None:
        """See `reference.rows.join`."""
        ranks, _, tokens = parts.shape
        grid = tiling.row_launch(RowKernel.JOIN, self._device).grid(tokens, summed=False)
        self._launch(RowKernel.JOIN, grid, (parts, statistics), (tokens, statistics.stride(0), ranks))

    def _launch(
        self, kernel: RowKernel, grid: int, tensors: Sequence[Tensor | None], scalars: tuple[float, ...], **flags: bool
    ) -> None:
        def run(spec: LaunchSpec) -> None:
            KERNELS.launch(kernel.value.module, kernel.value.function, spec, grid, tensors, scalars)

        launch_with_fallback(kernel.value.function, _spec(kernel, self._device, **flags), run, tiling.smaller)


@functools.lru_cache(maxsize=256)
def _spec(kernel: RowKernel, device: Device, **flags: bool) -> LaunchSpec:
    return LaunchSpec.of(tiling.row_launch(kernel, device), flags)


@functools.lru_cache(maxsize=64)
def _partials_spec(device: Device, **flags: bool) -> LaunchSpec:
    return LaunchSpec.of(tiling.PartialsLaunch(device=device), flags)


def _dense(values: Tensor) -> Tensor:
    """[tokens], contiguous; or a number where all elements are one element in memory."""
    if values.dim() and values.stride(0) == 0:
        return values[0]
    return values.contiguous()
