"""How much memory a loss takes: `Shape` -> `Demand`, for logits by PyTorch's product and for exponentials by a kernel's."""

from __future__ import annotations

from npu_tiling.pytorch.tensors import statistics_dtype

from . import chunks
from .cuda.tiling import ProductLaunch
from .shape import Shape, Task
from .splitting import Demand

_ROW_NUMBERS = 16  # of each row: statistics, coefficients, references, v


def of_logits(shape: Shape) -> Demand:
    """Memory for a loss whose logits PyTorch's product writes."""
    dtype, exact, logits = shape.x_dtype, statistics_dtype(shape.x_dtype), shape.logits_dtype
    once = shape.device is not None and shape.is_row_factor_times_exponentials
    sums = exact.itemsize if shape.needs.dx and logits != dtype else 0
    return Demand(
        tokens=shape.tokens,
        width=shape.width,
        vocabulary=shape.vocabulary,
        logit_bytes=logits.itemsize,
        dweight_bytes=dweight_bytes(shape),
        dx=shape.needs.dx and dtype.itemsize < exact.itemsize,
        kept_bytes=_kept_bytes(shape),
        scaled_bytes=shape.width * (dtype.itemsize + sums) if once and not has_room_for_sums(shape) else 0,
    )


def of_product(shape: Shape) -> Demand:
    """Memory for a loss whose exponentials a kernel's product writes, or keeps in registers."""
    assert shape.device is not None
    dtype, exact, needs = shape.x_dtype, statistics_dtype(shape.x_dtype), shape.needs
    is_stored = needs.dx or needs.dweight
    sums = exact.itemsize if needs.dx and shape.logits_dtype != dtype else 0
    tiles = ProductLaunch(width=shape.width, device=shape.device).column_tiles(shape.vocabulary)
    return Demand(
        tokens=shape.tokens,
        width=shape.width,
        vocabulary=shape.vocabulary,
        logit_bytes=dtype.itemsize if is_stored else 0,
        dweight_bytes=dweight_bytes(shape),
        dx=needs.dx,
        kept_bytes=_kept_bytes(shape),
        scaled_bytes=shape.width * (dtype.itemsize + sums) if is_stored else 0,
        sum_bytes=(tiles + _ROW_NUMBERS) * exact.itemsize,
        length_factor=2,
    )


def has_room_for_sums(shape: Shape) -> bool:
    """Whether exponentials leave half of each row of logits to sums of dx, [tokens, H]."""
    halves = 2 * shape.x_dtype.itemsize == shape.logits_dtype.itemsize
    return halves and 2 * shape.width <= chunks.pitch(shape.vocabulary)


def dweight_bytes(shape: Shape) -> int:
    """Bytes of an element of the weight's gradient, 0 if there is none; an adapter's is small, and does not count."""
    return (
        (shape.options.accum_dtype or shape.weight_dtype).itemsize if shape.needs.dweight and not shape.frozen_width else 0
    )


def _kept_bytes(shape: Shape) -> int:
    """Bytes of a logit, or of its exponential, in the memory of the weight's gradient; 0 if none may be there."""
    is_last = shape.task is Task.LOSS_AND_GRADIENTS  # a weight_grad holds other gradients
    keeps = is_last and dweight_bytes(shape) and shape.bias_dtype is None and shape.options.shift_invariant
    return shape.x_dtype.itemsize if keeps else 0
