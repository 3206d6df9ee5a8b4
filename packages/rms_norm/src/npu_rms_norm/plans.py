"""The plans of forward and backward, for all chips. Both begin with the rows of a call: strides, kernel, tile and grid.

Forward: one launch. It holds rows on chip, or reads them twice in blocks of columns ("wide").

Backward: one launch for rows (two for "wide" rows that need dx), and one for each of dweight and dbias, which adds partial
sums; none where a single program sees all rows and stores the gradient itself (`stores_sums`). Memory beside the results:
the partial sums, mean(g n) for "wide", the exchanged words for "shared", and copies of tensors that kernels cannot read in
place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from npu_tiling import Device
from npu_tiling.budget import FP32
from npu_tiling.calls import Empty, contiguous_strides
from npu_tiling.partials import add_partials
from npu_tiling.plans import Plan, Slot
from npu_tiling.rows import RowLayout, layout_of

from . import ascend, cuda
from .ascend import AscendTiling
from .call import MAX_COUNTED_ROWS, Backward, Forward, Rounding, Shape
from .cuda import CudaTiling
from .wide import backward_shared_kernel, backward_wide_kernel, backward_wide_mean_kernel, forward_wide_kernel

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Rows(NamedTuple):
    """The rows of a call.

    Attributes:
        copied: kernels cannot read the tensors with their strides, and need contiguous copies.
        tiling: kernel, tile and grid, as the chip's table chooses them.
        counts: the number of groups, and of rows in a group.
        strides: by the tensor's name, from group to group and from row to row, in elements; (0, 0) for a missing tensor.
            "extra": those of a gate, or of the residual or dsum; a call has one of them at most.
        offset: what kernels add to the weight. None on CUDA where it is 0, there is no fp32 weight and no bias: without the
            addition the compiler multiplies in 16 bits. The results have the same bits.
    """

    copied: bool
    tiling: AscendTiling | CudaTiling
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
    extra = [name for name in ("gate", "residual", "dsum") if name in slots]
    assert len(extra) < 2, f"a call has {' and '.join(extra)}"
    read = [slot.dtype for name, slot in slots.items() if name != "dx"]
    shape = _shape(call, rows, sizes[-1], strides, read, written)
    # Not with a bias: the compiler would fuse a 16-bit product with the addition of the bias, and not round in between.
    narrow_product = (call.weight is None or call.weight.dtype.itemsize < FP32) and call.bias is None
    offset = None if chip.kind == "cuda" and call.offset == 0.0 and narrow_product else call.offset
    strides["extra"] = strides[extra[0]] if extra else (0, 0)
    return Rows(copied, choose(shape, chip), (rows.n_outer, rows.n_inner), strides, offset)


def choose(shape: Shape, chip: Device) -> AscendTiling | CudaTiling:
    """Kernel, tile and grid, from the first row of the chip's table that fits (Ascend) or matches the shape (CUDA).

    Raises:
        UnifiedBufferError: nothing fits an Ascend chip's Unified Buffer.
    """
    return cuda.choose(shape, chip) if chip.kind == "cuda" else ascend.choose(shape, chip)


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


FORWARD_NAME = "rms_norm forward"


def forward(p: Plan, call: Forward) -> tuple[Slot | None, ...]:
    """y, the sum, y in fp32, rstd and the scales of a quantised y; None for what is not asked for."""
    wanted = call.results()
    if wanted["scale"] is not None:  # kernels store scales head by head; a contiguous copy is the result
        wanted["scale"] = wanted["scale"]._replace(last_outermost=call.has_heads())
    results = {name: p.new(each) for name, each in wanted.items()}
    if not call.x.numel():
        return tuple(results.values())
    tensors: dict[str, Any] = {"x": call.x, "residual": call.residual, "gate": call.gate}
    rows = rows_of(call, tensors, results["y"], p.chip)
    if rows.copied:
        tensors = {name: p.contiguous(each) for name, each in tensors.items()}
    weight, bias = p.contiguous(call.weight), p.contiguous(call.bias)
    tiling = p.decide(FORWARD_NAME, rows.tiling)
    of_chip = cuda if p.chip.kind == "cuda" else ascend
    p.launch(
        forward_wide_kernel if tiling.kernel == "wide" else of_chip.forward_kernel,
        FORWARD_NAME,
        tiling.grid,
        reads={f"p_{name}": each for name, each in tensors.items()} | {"p_weight": weight, "p_bias": bias},
        writes={f"p_{name}": each for name, each in results.items()},
        sizes=rows.sizes("x", "extra", eps=call.eps),
    )
    y, total, fp32, rstd, scale = results.values()
    return y, total, fp32, rstd, p.contiguous(scale)


BACKWARD_NAME = "rms_norm backward"


def backward(p: Plan, call: Backward, into: Slot | None = None) -> tuple[Slot | None, ...]:
    """dx, dgate, dweight and dbias; None for what is not asked for. `into`: dx is written to this slot, which may be dy."""
    if into is not None and _needs_copies(p, call, into):
        return _backward_with_copies(p, call, into)
    wanted = call.results()
    writes_dx = call.need_dx or (call.need_dgate and not call.norm_before_gate)  # where x is gated, dgate follows from dx
    dx = into or p.new(Empty(call.x.shape, call.x.dtype) if writes_dx else None)
    dgate, dweight, dbias = (p.new(wanted[name]) for name in ("dgate", "dweight", "dbias"))
    gradients = {"p_dw": dweight, "p_db": dbias}
    if call.dy.numel():
        sums = _backward_of_rows(p, call, dx, dgate, gradients)
        for name, gradient in gradients.items():
            if gradient is not None and sums[name] is not gradient:
                add_partials(p, f"sum of {name}", sums[name], gradient)
    else:
        for gradient in filter(None, gradients.values()):
            p.torch(torch.Tensor.zero_, gradient, writes=[gradient])
    return dx if call.need_dx else None, dgate, dweight, dbias


def backward_(p: Plan, call: Backward) -> tuple[Slot | None, ...]:
    """dweight and dbias; dx is written to dy."""
    into: Any = call.dy  # a plan's record has slots in place of tensors
    return backward(p, call, into)[2:]


def _tensors(call: Backward, dx: Slot | None) -> dict[str, Any]:
    return {"dy": call.dy, "dsum": call.dsum, "x": call.x, "gate": call.gate, "dx": dx}


def _needs_copies(p: Plan, call: Backward, into: Slot) -> bool:
    """Whether kernels cannot read these tensors and write `into` in place."""
    return bool(call.dy.numel()) and rows_of(call, _tensors(call, into), into, p.chip).copied


def _backward_with_copies(p: Plan, call: Backward, into: Slot) -> tuple[Slot | None, ...]:
    """The backward where `_needs_copies`: it copies dy or, where that does not help, computes dx apart and copies it."""
    if into is not call.dy and not call.dy.is_contiguous():
        return backward(p, call._replace(dy=p.contiguous(call.dy)), into)
    dx, *others = backward(p, call)
    p.torch(torch.Tensor.copy_, into, dx, writes=[into])
    return into, *others


def _backward_of_rows(
    p: Plan, call: Backward, dx: Slot | None, dgate: Slot | None, parameters: dict[str, Slot | None]
) -> dict[str, Any]:
    """Adds the launches that read rows.

    Returns the slots that hold dweight and dbias, by the kernels' parameter: `parameters` itself, or fp32 partial sums.
    """
    tensors = _tensors(call, dx)
    rows = rows_of(call, tensors, dx, p.chip)
    if rows.copied:
        tensors = {name: p.contiguous(each) for name, each in tensors.items()}
    weight, bias = p.contiguous(call.weight), p.contiguous(call.bias)
    rstd = _by_head(p, call.rstd) if call.has_heads() else p.contiguous(call.rstd)
    read = {f"p_{name}": each for name, each in tensors.items() if name != "dx"}
    read |= {"p_weight": weight, "p_rstd": rstd}
    tiling = p.decide(BACKWARD_NAME, rows.tiling)
    sums = parameters
    if not tiling.stores_sums:  # fp32 [splits, D] or [splits, H D]
        splits = tiling.splits // tiling.heads
        sums = {
            name: p.new(None if each is None else Empty((splits, each.numel()), torch.float32))
            for name, each in parameters.items()
        }
    written = {"p_dx": dx, "p_dgate": dgate, **sums}
    if tiling.kernel == "wide":
        _backward_of_wide_rows(p, rows, tiling, read | {"p_bias": bias}, written)
    elif tiling.kernel == "shared":
        _backward_of_shared_rows(p, rows, tiling, read, written)
    else:
        kernel = cuda.backward_kernel if p.chip.kind == "cuda" else ascend.backward_kernel
        sizes = rows.sizes("dy", "x", "dx", "extra")
        p.launch(kernel, BACKWARD_NAME, tiling.grid, reads=read | {"p_bias": bias}, writes=written, sizes=sizes)
    return sums


def _backward_of_wide_rows(p: Plan, rows: Rows, tiling: Any, read: dict[str, Any], written: dict[str, Any]) -> None:
    """A launch for mean(g n) of each row, where dx needs it, and one for the gradients."""
    mean = None
    if written["p_dx"] is not None:
        mean = p.new(Empty(read["p_rstd"].shape, torch.float32))
        p.launch(
            backward_wide_mean_kernel,
            BACKWARD_NAME,
            tiling.grid,
            reads={name: read[name] for name in ("p_dy", "p_x", "p_gate", "p_weight", "p_rstd")},
            writes={"p_mean": mean},
            sizes=rows.sizes("dy", "x", "gate"),
        )
    p.launch(
        backward_wide_kernel,
        BACKWARD_NAME,
        tiling.column_grid,
        reads=read | {"p_mean": mean},
        writes=written,
        sizes=rows.sizes("dy", "x", "dx", "extra", n_splits=tiling.splits),
    )


def _backward_of_shared_rows(p: Plan, rows: Rows, tiling: Any, read: dict[str, Any], written: dict[str, Any]) -> None:
    """A launch whose programs hold a row together. They exchange parts of mean(g n) in 64-bit words, zeros at first."""
    words = p.new(Empty((read["p_rstd"].numel() * tiling.share,), torch.int64))
    assert words is not None
    p.torch(torch.Tensor.zero_, words, writes=[words])
    p.launch(
        backward_shared_kernel,
        BACKWARD_NAME,
        tiling.grid,
        reads={name: read[name] for name in ("p_dy", "p_dsum", "p_x", "p_weight", "p_rstd")},
        writes={"p_dx": written["p_dx"], "p_dw": written["p_dw"], "p_words": words},
        sizes=rows.sizes("dy", "dsum", "x", "dx"),
    )


def _by_head(p: Plan, rstd: Any) -> Slot:
    """rstd [..., H] with its heads outermost in memory, as the forward makes it; else a copy of that form."""
    wanted = Empty(rstd.shape, rstd.dtype, last_outermost=True)
    order = (rstd.dim() - 1, *range(rstd.dim() - 1))
    shape, strides = (tuple(of[i] for i in order) for of in (rstd.shape, rstd.strides))
    heads_first = Slot(rstd.number, shape, strides, rstd.dtype, rstd.base)
    if heads_first.is_contiguous():
        return rstd
    copy = p.contiguous(p.view(rstd, shape, strides))
    assert copy is not None
    return p.view(copy, rstd.shape, wanted.strides)
