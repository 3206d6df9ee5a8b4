"""The launches of look-ups that sum or decode rows (bags), and of their backward up to dx and dsample."""

from __future__ import annotations

from typing import NamedTuple

import torch
from npu_tiling import Device, LaunchSpec, launch_with_fallback
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from .. import reference, tiling
from .specs import KERNELS, dense_rows, row_spec

_FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
EVERY_ID = 2**63 - 1  # as `n_total`: an id outside of the table at hand names a row of zeros, and none names NaN


class Bags(NamedTuple):
    """Ids and their bags.

    Attributes:
        indices: [n].
        offsets: [n_bags], or one more; None: bags of n / n_bags ids.
        base: int64 [K]: what is added to ids, to each in turn; None: nothing.
        sample_weights: [n]; None: 1.
        n_bags: how many.
        mean: whether sums are divided by how many ids a bag has.
        factor: of the sums.
        eps: rows, of bags of one id each, are over the roots of their mean squares plus this; None: they are not.
        left_out: the id that is not in its bag; NO_ID for none.
        first_row: the row of the whole table that the table at hand begins with.
        n_total: rows of the whole table.
    """

    indices: Tensor
    offsets: Tensor | None
    base: Tensor | None
    sample_weights: Tensor | None
    n_bags: int
    mean: bool
    factor: float
    eps: float | None
    left_out: int
    first_row: int
    n_total: int

    @property
    def ids(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """The tensors that kernels read."""
        rest = (self.offsets, self.base, self.sample_weights)
        offsets, base, sample = (None if each is None else each.contiguous() for each in rest)
        return self.indices.contiguous(), offsets, base, sample

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """What kernels ask of them."""
        n, offsets = self.indices.numel(), self.offsets
        each = n // self.n_bags if offsets is None else 0
        return n, self.n_bags, 0 if offsets is None else offsets.numel(), each, 1 if self.base is None else self.base.numel()


def forward(bags: Bags, weight: Tensor, row_scales: Tensor | None, dtype: torch.dtype, device: Device) -> Tensor:
    """[n_bags, D] in `dtype`."""
    n_rows, width = weight.shape
    out = allocate(weight, (bags.n_bags, width), dtype)
    if not out.numel() or not bags.indices.numel():
        return out.zero_()
    if not n_rows:  # a shard without rows; a kernel takes no tensor without elements
        weight = weight.new_zeros(1, width)
        row_scales = None if row_scales is None else row_scales.new_zeros(1)
    weight = dense_rows(weight)
    label, norm = _FORMATS.get(weight.dtype, ""), bags.eps is not None
    choose = tiling.norm_launch if norm else tiling.bags_launch if bags.offsets is not None else tiling.bag_tiles_launch
    if label == "e4m3" and device.kind != "cuda":  # decoding takes more tiles of the Unified Buffer than all else
        choose = tiling.bags_launch
    single = {"SINGLE": bags.indices.numel() == bags.n_bags} if device.kind != "cuda" else {}
    spec = row_spec(choose, width, dtype.itemsize, device, **single, FORMAT=label, MEAN=bags.mean, NORM=norm)
    if bags.eps is not None and spec.launch.column_blocks > 1:  # rows that no program has whole
        rows = forward(bags._replace(eps=None), weight, row_scales, torch.float32, device)
        local = bags.indices.long() - bags.first_row
        return reference.normalise(rows, (local >= 0) & (local < n_rows), bags.eps).to(dtype)
    row_scales = None if row_scales is None else row_scales.contiguous()
    tensors = (*bags.ids, weight.view(torch.int8) if label else weight, row_scales, out)
    last = bags.first_row + n_rows
    scalars = (
        *bags.sizes,
        bags.first_row,
        last,
        bags.n_total,
        bags.left_out,
        weight.stride(0),
        bags.factor,
        bags.eps or 0.0,
    )
    module = f"{device.kind}.bags"

    def run(spec: LaunchSpec) -> None:
        KERNELS.launch(module, "sum_bags_kernel", spec, spec.launch.grid(bags.n_bags), tensors, scalars)

    launch_with_fallback("embedding bags", spec, run, tiling.smaller)
    return out


def spread(dy: Tensor, bags: Bags, weight: Tensor | None, rows: bool, device: Device) -> tuple[Tensor | None, Tensor | None]:
    """Of dy [n_bags, D]: dx [n, D] of each position where `rows`; with `weight` the gradient of sample weights, fp32
    [n], where rows are not normalised."""
    n, width = bags.indices.numel(), dy.shape[-1]
    dx = allocate(dy, (n, width), dy.dtype) if rows else None
    if not n or not width or not bags.n_bags or (weight is not None and not len(weight)):
        dsample = None if weight is None or bags.eps is not None else dy.new_zeros(n, dtype=torch.float32)
        return None if dx is None else dx.zero_(), dsample
    norm = bags.eps is not None
    choose = tiling.norm_spread_launch if norm else tiling.spread_launch
    spec = row_spec(choose, width, dy.dtype.itemsize, device, MEAN=bags.mean, NORM=norm)
    if bags.eps is not None and spec.launch.column_blocks > 1:
        assert weight is not None
        x = forward(bags._replace(eps=None), weight, None, torch.float32, device)
        return (reference.normalise_backward(x, dy.float(), bags.eps) * bags.factor).to(dy.dtype), None
    dy = dense_rows(dy)
    weight = None if weight is None else dense_rows(weight)
    last = bags.first_row if weight is None else bags.first_row + len(weight)
    s_weight = 0 if weight is None else weight.stride(0)
    scalars = (*bags.sizes, bags.first_row, last, bags.left_out, dy.stride(0), s_weight, bags.factor, bags.eps or 0.0)
    module = f"{device.kind}.bags"

    def run(spec: LaunchSpec) -> Tensor | None:
        parts = None if weight is None or norm else allocate(dy, (spec.launch.column_blocks, n), torch.float32)
        tensors = (dy, *bags.ids, weight, dx, parts)
        KERNELS.launch(module, "spread_bags_kernel", spec, spec.launch.grid(bags.n_bags), tensors, scalars)
        return parts

    parts = launch_with_fallback("embedding bags backward", spec, run, tiling.smaller)
    return dx, None if parts is None else parts.sum(0) if len(parts) > 1 else parts[0]
