"""From chunks of a student's and a teacher's logits to kernel launches."""

from __future__ import annotations

import functools

import torch
from npu_tiling import Device, LaunchSpec
from torch import Tensor

from .. import tiling
from ..both.tiling.chunks import ChunkKernel
from ..chunks import DistilledChunk
from ..options import DistillationOptions
from . import specs
from .chunk import KERNELS


class DistillationKernels:
    """`reference.distillation.ReferenceDistillation` in Triton."""

    def __init__(
        self, bias: Tensor | None, teacher_bias: Tensor | None, options: DistillationOptions, device: Device
    ) -> None:
        self._bias, self._teacher_bias = bias, teacher_bias
        self._options, self._device = options, device

    def losses_and_gradient(self, chunk: DistilledChunk) -> None:
        """See `reference.distillation.ReferenceDistillation`."""
        student, teacher, target, factors, gradient, losses = chunk
        options, (rows, width) = self._options, student.shape
        hard = options.hard_weight != 0.0
        tensors = (student, gradient, teacher, target if hard else None, self._bias, self._teacher_bias, factors, losses)
        sizes = (rows, student.stride(0), 0 if gradient is None else gradient.stride(0), teacher.stride(0), losses.stride(0))
        temperature = options.temperature
        scales = (
            options.logit_scale / temperature,
            (options.softcap or 1.0) / temperature,
            options.teacher_logit_scale / temperature,
            (options.teacher_softcap or 1.0) / temperature,
            temperature,
            options.beta,
            options.soft_weight,
            options.hard_weight,
        )
        dtype = None if gradient is None else gradient.dtype
        biased = self._bias is not None or self._teacher_bias is not None
        spec = _spec(width, student.dtype, dtype, biased, options, self._device)
        function, module, *_ = ChunkKernel.DISTILLATION.value
        KERNELS.launch_rows(module, function, spec, rows, tensors, (*sizes, *scales), tiling.smaller)


@functools.lru_cache(maxsize=256)
def _spec(
    width: int,
    logits: torch.dtype,
    written: torch.dtype | None,
    biased: bool,
    options: DistillationOptions,
    device: Device,
) -> LaunchSpec:
    temperature = options.temperature
    flags = {
        "DIVERGENCE": options.divergence,
        "HARD": options.hard_weight != 0.0,
        "TEMPERED": temperature != 1.0,
        "SCALED": options.logit_scale / temperature != 1.0,
        "SOFTCAP": options.softcap is not None,
        "TEACHER_SCALED": options.teacher_logit_scale / temperature != 1.0,
        "TEACHER_SOFTCAP": options.teacher_softcap is not None,
    }
    changed = biased or any(flags[name] for name in ("SCALED", "SOFTCAP", "TEACHER_SCALED", "TEACHER_SOFTCAP"))
    return specs.of_chunk(ChunkKernel.DISTILLATION, width, logits, written, flags, device, transformed=changed)
