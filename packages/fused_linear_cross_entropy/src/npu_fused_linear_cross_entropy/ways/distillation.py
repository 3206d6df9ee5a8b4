"""Whole rows of a student's logits and of its teacher's at a time."""

from __future__ import annotations

import dataclasses
import functools
from math import floor, log2

import torch
from npu_tiling import Device
from npu_tiling.pytorch.tensors import allocate, statistics_dtype
from torch import Tensor

from .. import chunks, matmul, parallel, splitting
from ..calls import DistillationInputs
from ..chunks import Chunks, DistilledChunk, Layout, part
from ..demands import dweight_bytes
from ..distillation_rows import DistilledRows
from ..gradients import Gradients
from ..launch.distillation import DistillationKernels
from ..options import DistillationOptions
from ..partition import UNIT, evenly, exactly
from ..reference.distillation import ReferenceDistillation
from ..shape import Shape
from ..tiling import Tiling, Way, always, made, rule
from .head import Head

# Bytes for both models' logits: twice a loss's; on CUDA fewer, so that on an H200 no peer's form of distillation takes less.
_BUDGET = {**{kind: 2 * count for kind, count in splitting.DEFAULT_BUDGET.items()}, "cuda": 512 * splitting.MIB}

_RULE = rule(Way.DISTILLATION, Layout.ROWS, always, "whole rows of both models' logits")
# fp16 gradients of logits are at most about the first; their sums over tokens, the weight's gradient, stay this much larger.
_ENLARGED, _ENLARGED_SUMS = 256.0, 16.0
_TEMPORARIES = 10  # matrices as a chunk's logits that the arithmetic in PyTorch's operators takes


class Distillation(Head):
    """The losses of a distillation, and gradients.

    Args:
        inputs: all ranks' tokens, without leading dimensions.
        options: of the loss.
        shape: the student's part of it.
        device: whose kernels run; None for plain PyTorch.
    """

    def __init__(
        self, inputs: DistillationInputs, options: DistillationOptions, shape: Shape, device: Device | None
    ) -> None:
        tiling, self._enlargement = plan(shape, _teacher_dtype(inputs)), 1.0
        if shape.unfinished:
            self._enlargement = _enlargement(options)
            scale = tiling.dweight_scale / self._enlargement * min(self._enlargement, _ENLARGED_SUMS)
            tiling = dataclasses.replace(tiling, dweight_scale=scale)
        super().__init__(inputs, shape.options, tiling, device)
        self.facts = DistilledRows(inputs, options)
        self._teacher_x, self._teacher_weight, self._probs = inputs.teacher_x, inputs.teacher_weight, inputs.teacher_probs
        if self._teacher_weight is not None and self._teacher_x is not None:
            self._teacher_weight = self._teacher_weight.to(self._teacher_x.dtype)
        bias, teacher_bias = (None if b is None else b.contiguous() for b in (inputs.bias, inputs.teacher_bias))
        self._on_chunks: ReferenceDistillation | DistillationKernels = (
            ReferenceDistillation(bias, teacher_bias, options)
            if device is None or options.group  # whose ranks exchange what no kernel writes
            else DistillationKernels(bias, teacher_bias, options, device)
        )
        self._teacher_buffer = allocate(inputs.x, (self.tiling.buffer,), _teacher_dtype(inputs))
        self._least = 0.0 if self._probs is None else _least_probability(bias, self._teacher_buffer.dtype, options)

    def losses(self) -> Tensor:
        """Divergences and cross entropies of the targets, [2, N]."""
        losses = allocate(self.x, (2, self.x.shape[0]), self.tiling.exact)
        for tokens in self.tiling.chunks.tokens:
            self._chunk(tokens, None, losses)
        return losses

    def losses_and_gradients(self, dloss: Tensor | None) -> tuple[Tensor, Gradients]:
        """Losses as `losses` returns them, and gradients, given the upstream gradient, [1] or [N]; None for 1."""
        losses = allocate(self.x, (2, self.x.shape[0]), self.tiling.exact)
        (everything,) = self.tiling.chunks.columns
        divisor, is_unfinished = self.facts.divisor, self.tiling.shape.unfinished
        upstream = torch.ones((), dtype=losses.dtype, device=losses.device) if dloss is None else dloss
        size = self.facts.size / self._enlargement
        factors = self.facts.factors(upstream, size if is_unfinished else divisor)
        for tokens in self.tiling.chunks.tokens:
            self.gradients.add(tokens, everything, self._chunk(tokens, factors, losses))
        self.release()
        if not is_unfinished:
            return losses, self.gradients.finished()
        scale = 1.0 / self.tiling.dweight_scale  # of sums of enlarged gradients
        return losses, self.gradients.finished(losses.new_tensor([1.0, scale, scale]) * size / divisor)

    def release(self) -> None:
        super().release()
        self._teacher_buffer = self._teacher_buffer.new_empty(0)

    def _chunk(self, tokens: slice, factors: Tensor | None, losses: Tensor) -> Tensor:
        """Writes the losses of a chunk of tokens, and given factors returns the gradient of the student's raw products."""
        (everything,) = self.tiling.chunks.columns
        student = self.products(tokens, everything)
        gradient = self.gradient_memory(student)
        teacher = self._teacher_buffer.as_strided(student.shape, student.stride())
        if self._probs is not None:
            teacher.copy_(part(self._probs, tokens)).clamp_min_(self._least).log_()
        else:
            assert self._teacher_x is not None and self._teacher_weight is not None
            matmul.product(part(self._teacher_x, tokens), self._teacher_weight.t(), teacher)
        chunk = DistilledChunk(
            student=student,
            teacher=teacher,
            target=part(self.facts.columns, tokens),
            factors=part(factors, tokens),
            gradient=None if factors is None else gradient,
            losses=part(losses, tokens, 1),
        )
        self._on_chunks.losses_and_gradient(chunk)
        return gradient


def _enlargement(options: DistillationOptions) -> float:
    """The power of two that gradients of logits are multiplied by before they are rounded to fp16.

    They are small where a student is close to its teacher, unless there are hard labels: fp16 has fewer digits below 6e-5,
    and none below 6e-8.
    """
    largest = abs(options.logit_scale * options.soft_weight) / options.temperature
    return 1.0 if options.hard_weight or not largest else max(1.0, 2.0 ** floor(log2(_ENLARGED / largest)))


def _least_probability(bias: Tensor | None, dtype: torch.dtype, options: DistillationOptions) -> Tensor | float:
    """What a teacher's probabilities count as at least, one number or [V].

    0, but for the divergence that is infinite where a teacher alone rules a column out.
    """
    if options.divergence != "reverse_kl":
        return 0.0
    tiny = torch.finfo(dtype).tiny
    return tiny if bias is None else torch.full_like(bias, tiny, dtype=dtype).masked_fill_(bias == -torch.inf, 0.0)


def _teacher_dtype(inputs: DistillationInputs) -> torch.dtype:
    """Of the teacher's logits in memory."""
    if inputs.teacher_x is None:
        return statistics_dtype(inputs.x.dtype)
    dtype = inputs.teacher_x.dtype
    return statistics_dtype(dtype) if matmul.writes_fp32(inputs.teacher_x.device, dtype) else dtype


def plan(shape: Shape, teacher_dtype: torch.dtype) -> Tiling:
    """Chunks of tokens, whose whole rows of logits of both models are in memory."""
    columns = parallel.most_columns(shape.options, shape.vocabulary)
    return _plan(shape, teacher_dtype, columns)


@functools.lru_cache(maxsize=1024)
def _plan(shape: Shape, teacher_dtype: torch.dtype, vocabulary: int) -> Tiling:
    """`vocabulary`: columns that each rank has in equal parts."""
    budget = shape.options.memory_budget or _BUDGET["cpu" if shape.device is None else shape.device.kind]
    exact, pitch, sum_dtype = statistics_dtype(shape.x_dtype), chunks.pitch(vocabulary), shape.options.accum_dtype
    row = pitch * (shape.logits_dtype.itemsize + teacher_dtype.itemsize)
    if shape.options.group:
        row += pitch * _TEMPORARIES * exact.itemsize
    parts = _split(shape, budget // row)
    sums = vocabulary * shape.width * exact.itemsize
    if shape.frozen_width:
        sum_dtype = sum_dtype or exact
    elif sum_dtype is None and len(parts.tokens) > 1 and shape.needs.dweight and 2 * sums <= budget:
        sum_dtype = exact
        parts = _split(shape._replace(weight_dtype=exact), (budget - sums) // row)
    return made(shape, _RULE, parts, sum_dtype or shape.weight_dtype)


def _split(shape: Shape, affordable: int) -> Chunks:
    """Chunks of at most so many tokens, and no more than hide the traffic of the weight."""
    everything = (slice(0, shape.vocabulary),)
    given, tokens = shape.options.chunk_tokens, shape.tokens
    if given is not None:
        return Chunks(tokens=exactly(tokens, given), columns=everything, why="chunk_tokens was given")
    wanted = splitting.wanted_tokens(dweight_bytes(shape), shape.device)
    longest = min(wanted, max(affordable // UNIT * UNIT or affordable, 1))
    why = f"the budget holds {affordable} tokens, and {wanted} hide the weight's traffic behind products"
    return Chunks(tokens=evenly(tokens, longest), columns=everything, why=why)
