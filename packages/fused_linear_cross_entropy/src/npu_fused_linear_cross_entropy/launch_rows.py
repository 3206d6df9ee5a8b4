"""From vectors of [tokens] to kernel launches: what rows.py defines, on an accelerator."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from npu_tiling import Device, LaunchSpec, launch_with_fallback
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from . import parallel, tiling_rows
from .launch import KERNELS
from .options import Options
from .rows import Losses, Rows

_LANES = 8  # numbers of a row of partial sums, and of factors: 32 bytes
_READ = (torch.float32, torch.int64, torch.int32)  # dtypes of a divisor that the kernel reads
_COUNTED = 2**24  # integers below are fp32 numbers


class RowKernels:
    """`prepare`, `losses` and `coefficients` of rows.py, a launch each; two where rows are many, or of several ranks."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def prepare(
        self,
        target: Tensor,
        class_weight: Tensor | None,
        divisor: Tensor | None,
        options: Options,
        dtype: torch.dtype,
        dweight_scale: float | None,
    ) -> Rows:
        """See `rows.prepare`."""
        target, mean = target.contiguous(), options.reduction == "mean"
        if divisor is not None:
            divisor = divisor.to(target.device, divisor.dtype if divisor.dtype in _READ else torch.float32) if mean else None
        class_weight = None if class_weight is None else class_weight.contiguous()
        tokens, weights = target.numel(), 0 if class_weight is None else class_weight.numel()
        columns = allocate(target, (tokens,), torch.int32)
        target_weight = None if class_weight is None else allocate(target, (tokens,), torch.float32)
        factors = allocate(target, (2, _LANES), torch.float32)
        left = None if dweight_scale is None else allocate(target, (3,), torch.float32)
        unscale = 1.0 / (dweight_scale or 1.0)
        kind = "targets" if class_weight is None else "weighted targets"
        launch = tiling_rows.row_launch(kind, self._device)
        grid = launch.grid(max(tokens, weights if options.smoothed else 0), True)
        exchanged = bool(options.group) and class_weight is not None
        partials = allocate(target, (grid, _LANES), torch.float32) if grid > 1 or exchanged else None
        self._launch(
            "kernels_rows",
            kind,
            grid,
            (target, class_weight, divisor, columns, target_weight, factors, left, partials),
            (tokens, options.ignore_index, options.vocab_size, options.vocab_first, weights, unscale),
            SMALL_INDEX=abs(options.ignore_index) < _COUNTED,
            SMOOTHED=options.smoothed,
            MEAN=mean,
            LAST=partials is None,
        )
        if partials is not None:
            if exchanged:
                assert target_weight is not None
                parallel.sum_(target_weight, options.group)
                partials = partials.sum(0, keepdim=True)
                parallel.sum_(partials[0, 1:3], options.group)
            self._add("kernels_rows", "factors", (partials, divisor, factors, left), (partials.shape[0], unscale), MEAN=mean)
        # Both rows of factors are equal where nothing is left for later.
        return Rows(columns, target_weight, factors[0], factors[0] if left is None else factors[1], left)

    def losses(self, rows: Rows, statistics: Tensor, options: Options, shape: torch.Size) -> Losses:
        """See `rows.losses`."""
        reduced = options.reduction != "none"
        summed = reduced or options.return_token_accuracy
        launch, tokens = tiling_rows.row_launch("losses", self._device), statistics.shape[1]
        grid = launch.grid(tokens, summed)
        partials = allocate(statistics, (grid, _LANES), torch.float32) if summed and grid > 1 else None
        size = () if reduced else shape

        def output(wanted: bool, size: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor | None:
            return allocate(statistics, size, dtype) if wanted else None

        found = Losses(
            allocate(statistics, size, torch.float32),
            output(options.return_z_loss, size),
            output(options.return_token_accuracy, ()),
            output(options.return_predicted_tokens, shape, torch.int64),
            output(options.return_lse, shape),
            output(options.return_entropy, shape),
        )
        self._launch(
            "kernels_losses",
            "losses",
            grid,
            (statistics, rows.columns, rows.target_weight, rows.factors, *found, partials),
            (tokens, statistics.stride(0), options.vocab_size, options.label_smoothing, options.lse_square_scale),
            SMOOTHED=options.smoothed,
            Z_LOSS=options.lse_square_scale != 0.0 or options.return_z_loss,
            TOKEN_SCALING=options.token_scaling,
            REDUCED=reduced,
            LAST=partials is None,
        )
        if partials is not None:
            tensors = (partials, rows.factors, *found[:3])
            self._add("kernels_losses", "sums", tensors, (grid,), REDUCED=reduced)
        return found

    def coefficients(
        self, rows: Rows, statistics: Tensor, options: Options, dloss: Tensor | float | None, dentropy: Tensor | None
    ) -> Tensor:
        """See `rows.coefficients`; q is there with entropies alone, and a number that is no tensor must be 1."""
        assert not isinstance(dloss, float) or dloss == 1.0
        tokens = statistics.shape[1]
        result = allocate(statistics, (5, tokens), torch.float32)
        given = (_dense(dloss) if isinstance(dloss, Tensor) else None, None if dentropy is None else _dense(dentropy))
        self._launch(
            "kernels_losses",
            "coefficients",
            tiling_rows.row_launch("coefficients", self._device).grid(tokens, False),
            (statistics, rows.columns, rows.target_weight, rows.gradient_factors, *given, result),
            (tokens, statistics.stride(0), tokens, options.vocab_size, options.label_smoothing, options.lse_square_scale),
            LOSS=dloss is not None,
            EACH_LOSS=given[0] is not None and given[0].dim() > 0,
            ENTROPY=options.return_entropy,
            EACH_ENTROPY=given[1] is not None and given[1].dim() > 0,
            TOKEN_SCALING=options.token_scaling,
        )
        return result

    def _launch(
        self,
        module: str,
        kernel: str,
        grid: int,
        tensors: Sequence[Tensor | None],
        scalars: tuple[float, ...],
        **flags: bool,
    ) -> None:
        def run(spec: LaunchSpec) -> None:
            KERNELS.launch(module, f"cross_entropy_{kernel.split()[-1]}_kernel", spec, grid, tensors, scalars)

        launch_with_fallback(kernel, _spec(kernel, tuple(flags.items()), self._device), run, _smaller)

    def _add(
        self, module: str, kernel: str, tensors: Sequence[Tensor | None], scalars: tuple[float, ...], **flags: bool
    ) -> None:
        spec = _spec("", tuple(flags.items()), self._device)
        KERNELS.launch(module, f"cross_entropy_{kernel}_kernel", spec, 1, tensors, scalars)


@functools.lru_cache(maxsize=256)
def _spec(kernel: str, flags: tuple[tuple[str, bool], ...], device: Device) -> LaunchSpec:
    launch = tiling_rows.row_launch(kernel, device) if kernel else tiling_rows.PartialsLaunch(device)
    return LaunchSpec.of(launch, dict(flags))


def _smaller(spec: LaunchSpec) -> LaunchSpec | None:
    return spec.smaller(tiling_rows.smaller)


def _dense(values: Tensor) -> Tensor:
    """[tokens], contiguous, or one number where all are the same one."""
    if values.dim() and values.stride(0) == 0:
        return values[0]
    return values.contiguous()
