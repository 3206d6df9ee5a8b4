"""The rows of a call: their strides, and the kernel, tile and grid that follow. Forward and backward plans begin here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from npu_tiling import Device
from npu_tiling.budget import FP32
from npu_tiling.calls import contiguous_strides
from npu_tiling.plans import Slot
from npu_tiling.rows import RowLayout, layout_of

from .ascend import tiling as ascend
from .ascend.tiling import AscendTiling
from .call import Backward, Forward
from .cuda import tiling as cuda
from .cuda.tiling import CudaTiling
from .shape import MAX_COUNTED_ROWS, Rounding, Shape

Tiling = AscendTiling | CudaTiling
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Rows(NamedTuple):
    """The rows of a call.

    Attributes:
        copied: kernels cannot read the tensors with their strides, and need contiguous copies.
        tiling: kernel, tile and grid, as the chip's table chooses them.
        counts: the number of groups, and of rows in a group.
        strides: by the tensor's name, from group to group and from row to row, in elements; (0, 0) for a missing tensor.
        offset: what kernels add to the weight. None on CUDA where it is 0, there is no fp32 weight and no bias: without the
            addition the compiler multiplies in 16 bits. The results have the same bits.
    """

    copied: bool
    tiling: Tiling
    counts: tuple[int, int]
    strides: Mapping[str, tuple[int, int]]
    offset: float | None

    def sizes(self, *names: str, **others: Any) -> dict[str, Any]:
        """A kernel's numbers by parameter: counts, the strides of the tensors with these names, the offset, and `others`."""
        strides = {
            f"s_{name}_{level}": self.strides[name][i] for name in names for i, level in enumerate(("outer", "inner"))
        }
        return {"n_outer": self.counts[0], "n_inner": self.counts[1], **strides, "offset": self.offset, **others}


def rows_of(call: Forward | Backward, tensors: Mapping[str, Slot | None], written: Slot | None, chip: Device) -> Rows:
    """The rows of these tensors of a call.

    Args:
        call: the record.
        tensors: by name; "dx" is written, the others are read. y, which is contiguous, is not among them.
        written: y or dx; None: the call writes no rows.
        chip: the chip that will run it.
    """
    slots = {name: slot for name, slot in tensors.items() if slot is not None}
    sizes, per_head = next(iter(slots.values())).shape, call.has_heads()
    rows, copied = _layout(sizes, [slot.strides for slot in slots.values()], per_head=per_head), False
    if rows is None:
        rows, copied = _layout(sizes, [contiguous_strides(sizes)] * len(slots), per_head=per_head), True
    assert rows is not None
    strides = dict.fromkeys(tensors, (0, 0)) | dict(zip(slots, rows.strides, strict=True))
    read = [slot.dtype for name, slot in slots.items() if name != "dx"]
    shape = _shape(call, rows, sizes[-1], strides, read, written)
    # Not with a bias: the compiler would fuse a 16-bit product with the addition of the bias, and not round in between.
    narrow_product = (call.weight is None or call.weight.dtype.itemsize < FP32) and call.bias is None
    offset = None if chip.kind == "cuda" and call.offset == 0.0 and narrow_product else call.offset
    return Rows(copied, choose(shape, chip), (rows.n_outer, rows.n_inner), strides, offset)


def choose(shape: Shape, chip: Device) -> Tiling:
    """Kernel, tile and grid, from the first row of the chip's table that fits (Ascend) or matches the shape (CUDA).

    Raises:
        UnifiedBufferError: nothing fits an Ascend chip's Unified Buffer.
    """
    return cuda.choose(shape, chip) if chip.kind == "cuda" else ascend.choose(shape, chip)


def smaller(tiling: Tiling) -> Tiling | None:
    """The next smaller tiling on Ascend, for a compiler that needs more Unified Buffer than was declared; else None."""
    return ascend.smaller(tiling) if isinstance(tiling, AscendTiling) else None


def _shape(
    call: Forward | Backward,
    rows: RowLayout,
    width: int,
    strides: Mapping[str, tuple[int, int]],
    read: Sequence[torch.dtype],
    written: Slot | None,
) -> Shape:
    """What the tables of both chips decide from."""
    per_head, result = call.has_heads(), None if written is None else written.dtype
    outer_stride, inner_stride = (max(of) for of in zip(*strides.values(), strict=True))
    if per_head:  # y and dgate are contiguous: a head's rows lie this far apart in them
        inner_stride = max(inner_stride, rows.n_outer * width)
    rounded_to = call.rounded_to if isinstance(call, Backward) else call.x.dtype
    weight = None if call.weight is None else _NAMES[call.weight.dtype]
    return Shape(
        backward=isinstance(call, Backward),
        n_outer=rows.n_outer,
        n_inner=rows.n_inner,
        width=width,
        outer_stride=outer_stride,
        inner_stride=inner_stride,
        itemsizes=tuple(dtype.itemsize for dtype in read),
        narrow=any(dtype.itemsize < FP32 for dtype in (*read, result) if dtype is not None),
        rounding=Rounding.of(call.casting_mode, _NAMES[rounded_to], weight),
        activation="" if call.gate is None else call.activation,
        gate_first=call.gate is not None and not call.norm_before_gate,
        second_output=isinstance(call, Forward) and (call.return_fp32 or call.dtype != call.x.dtype),
        per_head=per_head,
        biased=call.bias is not None,
        quantised=result is not None and result.itemsize == 1,
        with_rows=result is not None,
    )


def _layout(sizes: Sequence[int], strides: Sequence[tuple[int, ...]], *, per_head: bool) -> RowLayout | None:
    """The layout of rows with these strides; None: kernels cannot read them in place."""
    if per_head:
        return layout_by_head(sizes, strides)
    rows = layout_of(sizes, strides)
    # Groups may not have more rows than kernels count.
    return None if rows and rows.n_outer > 1 and rows.n_outer * rows.n_inner > MAX_COUNTED_ROWS else rows


def layout_by_head(sizes: Sequence[int], strides: Sequence[tuple[int, ...]]) -> RowLayout | None:
    """The layout of tensors [..., H, D] with a group for each head; None where a head's rows have no single stride."""
    rows = layout_of((*sizes[:-2], sizes[-1]), [(*stride[:-2], stride[-1]) for stride in strides])
    if rows is None or rows.n_outer > 1:
        return None
    pairs = tuple((stride[-2], inner) for stride, (_, inner) in zip(strides, rows.strides, strict=True))
    return RowLayout(sizes[-2], rows.n_inner, pairs)
