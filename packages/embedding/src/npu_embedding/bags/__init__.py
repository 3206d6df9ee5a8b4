"""`embedding_bag`, from its arguments to an operator, its module and its autograd: several ids a result.

Rows that are decoded, scaled or normalised (`computed_rows`) are bags of one id each.

Experimental: no trainer and no model that we know calls bags, or `row_scales` and `rms_norm_eps` of `embedding`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from npu_tiling import arguments
from npu_tiling.calls import Empty, derive, statistics_dtype
from npu_tiling.dispatch import Function, apply, holds, is_certain, save_tensors
from npu_tiling.dtensor import is_distributed
from npu_tiling.operators import Operator
from npu_tiling.plans import Plan, Slot
from torch import Tensor, nn

from .. import reference
from ..call import NO_ID, NO_ROW, Bags, Forward, Renormalise, Spread, check_inside, check_table, numbers, padding_row
from ..lookup import FORWARD, LIBRARY, RENORMALISE, gradient_of_table, largest_norm
from ..rows import COPIES, RowShape, dense_rows, fill

_FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
_EVERY_ID = 2**63 - 1  # as `n_total`: ids of other shards give zeros, and none gives NaN


def embedding_bag(
    indices: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
    *,
    table_offsets: Tensor | Sequence[int] | None = None,
    row_scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Sums, means or concatenations of rows of a table, by index: `torch.nn.functional.embedding_bag`.

        out[b] = sum over the positions i of bag b of per_sample_weights[i] * weight[indices[i]]      mode "sum"
        out[b] = sum over the positions i of bag b of weight[indices[i]] / their number               mode "mean"
        out[b] = weight[indices[b, 0]], ..., weight[indices[b, K - 1]]                                mode "concat"

    Sums are fp32, rounded once, in the order of the positions. On CUDA a bag of more than 64 ids is summed in parts of 64,
    from its start, and the sums of the parts are added in order. So a bag has the same bits whatever other bags there are. A
    bag without ids is zeros. The gradient of `weight` is that of `embedding`, of rows that are dy of their bag times their
    weight, rounded to dy's dtype. An index outside the table is an error on a CPU; elsewhere its bag is NaN.

    Args:
        indices: [n] with `offsets`, or [..., K]: bags of K ids. int32 or int64.
        weight, max_norm, norm_type, scale_grad_by_freq, sparse, row_scales, dtype: see `embedding`.
        offsets: [B], int32 or int64: the first position of each bag, ascending from 0.
        mode: "sum", "mean" or "concat" (indices [..., K] alone).
        per_sample_weights: of indices' shape, in weight's dtype or fp32; mode "sum" alone. They have a gradient too.
        include_last_offset: `offsets` is [B + 1]: where the last bag ends, too.
        padding_idx: such ids are not in their bag and do not count for the mean. Mode "concat" has the row as it is. It gets
            no gradient. With `table_offsets` it counts in the whole of the tables.
        table_offsets: [K], int64: `weight` is K tables one after the other; a bag's k-th id counts from the k-th offset.
            It is compared with the rows of all tables, not with those of its own.

    Returns:
        [B, D] or [..., D], or [..., K * D] for mode "concat"; in weight's dtype, or `dtype`.

    Raises:
        TypeError: an argument has a type or dtype that is not supported.
        ValueError: shapes, devices or options do not match.
        IndexError: an index is outside the table (CPU).
        NotImplementedError: mode is "max".

    Source: torch.nn.functional.embedding_bag.
    """
    if is_distributed((indices, weight)):
        raise TypeError("weight or indices is a DTensor and must be a plain tensor.")
    dtype = check_table(indices, weight, row_scales, dtype)
    padding = padding_row(padding_idx, len(weight))
    if max_norm is not None:
        max_norm = largest_norm(max_norm, row_scales)
    norm_type = arguments.number("norm_type", norm_type, finite=False)
    arguments.flags(scale_grad_by_freq=scale_grad_by_freq, sparse=sparse, include_last_offset=include_last_offset)
    check_mode(mode)
    n_bags = _check_bags(indices, offsets, include_last_offset, mode)
    _check_weights(per_sample_weights, indices, weight, row_scales, mode)
    base = None if table_offsets is None else _table_offsets(table_offsets, indices, offsets)
    if offsets is None:
        check_inside(indices, len(weight), base)
    if max_norm is not None:
        ids = indices if base is None else indices + base
        RENORMALISE(Renormalise(ids, weight.detach(), max_norm, norm_type, 0, len(weight)))
    if mode == "concat":
        ids = indices if base is None else indices + base
        look_up = Forward(ids, weight, padding, scale_grad_by_freq, sparse, first_row=0, n_total=len(weight))
        rows: Tensor = FORWARD(look_up) if row_scales is None else computed_rows(look_up, row_scales, 1.0, None, dtype)
        return rows.flatten(-2)
    call = Bags(
        indices=indices.reshape(-1),
        offsets=offsets,
        base=base,
        sample_weights=None if per_sample_weights is None else per_sample_weights.reshape(-1),
        weight=weight,
        row_scales=row_scales,
        n_bags=n_bags,
        mean=mode == "mean",
        factor=1.0,
        eps=None,
        left_out=NO_ID if padding == NO_ROW else padding,
        dtype=dtype,
        padding_idx=padding,
        scale_grad_by_freq=scale_grad_by_freq,
        sparse=sparse,
        first_row=0,
        n_total=len(weight),
    )
    out: Tensor = BAGS(call)
    return out if offsets is not None else out.view(*indices.shape[:-1], weight.shape[1])


def computed_rows(call: Forward, row_scales: Tensor | None, factor: float, eps: float | None, dtype: torch.dtype) -> Tensor:
    """[..., D]: rows, decoded, times a factor, normalised: bags of one id each, of which none is left out."""
    indices = call.indices.reshape(-1)
    of_one = {"offsets": None, "base": None, "sample_weights": None, "n_bags": indices.numel(), "left_out": NO_ID}
    computed = {"row_scales": row_scales, "mean": False, "factor": factor, "eps": eps, "dtype": dtype}
    out: Tensor = BAGS(derive(Bags, call, indices=indices, **of_one, **computed))
    return out.view(*call.indices.shape, call.weight.shape[1])


class EmbeddingBag(nn.EmbeddingBag):
    """torch.nn.EmbeddingBag, with `npu_embedding.embedding_bag` for its forward and its gradient.

    Arguments, attributes, `from_pretrained`, initial values and state_dict are those of torch.nn.EmbeddingBag.

    Raises:
        NotImplementedError: mode is "max".
        ValueError: mode is not "sum", "mean" or "concat"; torch has no "concat".
    """

    @functools.wraps(nn.EmbeddingBag.__init__)  # type: ignore[misc]  # whose signature it has
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_mode(self.mode)

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Sums or means [B, embedding_dim] of rows for indices [B, K], or [n] with offsets [B]."""
        return embedding_bag(
            input,
            self.weight,
            offsets,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.mode,
            self.sparse,
            per_sample_weights,
            self.include_last_offset and offsets is not None,
            self.padding_idx,
        )


def check_mode(mode: str) -> None:
    """Raises ValueError for what is no mode, and NotImplementedError for one of torch's that there is no kernel for."""
    if mode == "max":
        raise NotImplementedError(
            "mode is 'max' and must be 'sum', 'mean' or 'concat': for ids [..., K] without padding take "
            "embedding(...).amax(-2)."
        )
    arguments.one_of("mode", mode, ("sum", "mean", "concat"))


def _check_bags(indices: Tensor, offsets: Tensor | None, include_last_offset: bool, mode: str) -> int:
    """How many bags."""
    if offsets is None:
        if indices.dim() < 2:
            shape = tuple(indices.shape)
            raise ValueError(f"indices has shape {shape} and must have at least two dimensions, or offsets must be given.")
        if include_last_offset:
            raise ValueError("include_last_offset is True and must be False where offsets is None.")
        return math.prod(indices.shape[:-1])
    arguments.tensor("offsets", offsets, or_none=True)
    if indices.dim() != 1:
        raise ValueError(f"indices has shape {tuple(indices.shape)} and must have one dimension where offsets is given.")
    arguments.dtype("offsets", offsets, torch.int32, torch.int64)
    if offsets.dim() != 1 or not holds(offsets.numel() >= int(include_last_offset)):  # compilers' sizes take no bool
        least = " of at least 1" if include_last_offset else ""
        raise ValueError(f"offsets has shape {tuple(offsets.shape)} and must have one dimension{least}.")
    arguments.device("offsets", offsets, indices, "indices'")
    if not holds((torch.sym_min if torch.compiler.is_compiling() else min)(indices.numel(), 1) <= offsets.numel()):
        raise ValueError(f"offsets is empty and must begin with 0 where there are indices: there are {indices.numel()}.")
    if mode == "concat":
        raise ValueError("mode is 'concat' and must be 'sum' or 'mean' where offsets is given.")
    return offsets.numel() - int(include_last_offset)


def _check_weights(weights: Tensor | None, indices: Tensor, weight: Tensor, row_scales: Tensor | None, mode: str) -> None:
    if weights is None:
        return
    arguments.floating("per_sample_weights", weights)
    arguments.shape("per_sample_weights", weights, indices.shape)
    arguments.device("per_sample_weights", weights, indices, "indices'")
    if row_scales is None:
        arguments.parameter_dtype("per_sample_weights", weights, weight, "weight's")
    elif weights.requires_grad:
        raise ValueError("per_sample_weights requires grad and must not where row_scales is given: detach it.")
    if mode != "sum":
        raise ValueError(f"mode is {mode!r} and must be 'sum' where per_sample_weights is given.")


def _table_offsets(value: Tensor | Sequence[int], indices: Tensor, offsets: Tensor | None) -> Tensor | None:
    """int64 [K] where the indices are; None for no tables."""
    if offsets is not None:
        raise ValueError(
            "table_offsets is given and must be None where offsets is: bags have as many ids as there are tables."
        )
    found = numbers("table_offsets", value, indices, "indices'", least=0)
    arguments.shape("table_offsets", found, indices.shape[-1:])
    return found if found.numel() else None


def bags(p: Plan, call: Bags) -> tuple[Slot]:
    """[n_bags, D] in `dtype`: one launch, two where bags may be in parts. PyTorch normalises rows of several blocks."""
    from .. import cuda
    from . import ascend  # modules of kernels import Triton

    out, (n_rows, width), n = p.new(call.results()["out"]), call.weight.shape, call.indices.numel()
    if not out.numel() or not n:
        return (fill(p, out, 0),)
    name, on_cuda, norm = "embedding bags", p.chip.kind == "cuda", call.eps is not None
    weight: Any = call.weight
    steps: Any = call.row_scales
    label = _FORMATS.get(weight.dtype, "")
    flags: dict[str, Any] = {"FORMAT": label, "MEAN": call.mean}
    shape = RowShape(width=width, itemsize=call.dtype.itemsize, device=p.chip)
    chosen: Any
    if on_cuda:
        longest = n // call.n_bags if call.offsets is None else n  # ids of a bag at most
        flags["PART"] = cuda.PART if longest > cuda.PART else 0
        if norm:
            chosen = cuda.norm_tiling(shape)
        elif flags["PART"] or call.offsets is not None:
            chosen = cuda.bags_tiling(shape, cuda.BAGS)
        else:
            chosen = COPIES.tiling(shape, {"BLOCK_M": 1})
    else:  # decoding of e4m3 takes more tiles of the Unified Buffer than all else
        flags["SINGLE"] = n == call.n_bags
        by_row = label == "e4m3" or (call.offsets is not None and not norm)
        chosen = ascend.BAGS.tiling(shape) if by_row else ascend.tiles_of_bags(ascend.BAG_TILES, shape)
    tiling = p.decide(name, chosen)
    if norm and tiling.column_blocks > 1:
        (rows,) = bags(p, call._replace(eps=None, dtype=torch.float32))
        p.torch(_normalise, out, rows, call.indices, call.first_row, n_rows, call.eps, writes=[out])
        return (out,)
    if not n_rows:  # a shard without rows; a kernel takes no tensor without elements
        weight = fill(p, p.new(Empty((1, width), weight.dtype)), 0)
        steps = None if steps is None else fill(p, p.new(Empty((1,), steps.dtype)), 0)
    weight = dense_rows(p, weight)
    sizes = _sizes(call, n_rows) | {"n_total": call.n_total, "s_weight": weight.strides[0]}
    rows = p.view(weight, weight.shape, weight.strides, dtype=torch.int8) if label else weight
    reads = {**_ids(p, call), "p_weight": rows, "p_steps": p.contiguous(steps)}
    if on_cuda:
        cuda.add_sums(p, name, tiling, shape, flags, out, reads, sizes)
    else:
        given = {"reads": reads, "writes": {"p_out": out}, "sizes": sizes, "flags": flags}
        p.launch(ascend.sum_bags_kernel, name, tiling.grid(call.n_bags), **given)
    return (out,)


def spread(p: Plan, call: Spread) -> tuple[Slot | None, Slot | None]:
    """dx [n, D] where `need_dx`; dsample, fp32 [n], where there is a `weight` and no `eps`."""
    from .. import cuda
    from . import ascend

    wanted, n, width = call.results(), call.indices.numel(), call.dy.shape[-1]
    dx, norm, no_rows = p.new(wanted["dx"]), call.eps is not None, call.weight is not None and not call.weight.shape[0]
    if not n or not width or not call.n_bags or no_rows:
        dsample = p.new(wanted["dsample"])
        return None if dx is None else fill(p, dx, 0), None if dsample is None else fill(p, dsample, 0)
    on_cuda = p.chip.kind == "cuda"
    module: Any = cuda if on_cuda else ascend
    shape = RowShape(width=width, itemsize=call.dtype.itemsize, device=p.chip)
    chosen: Any
    if on_cuda:
        chosen = cuda.norm_tiling(shape) if norm else cuda.spread_tiling(shape)
    else:
        chosen = ascend.tiles_of_bags(ascend.SPREAD_TILES, shape) if norm else ascend.SPREAD.tiling(shape)
    tiling = p.decide("embedding bags backward", chosen)
    if norm and tiling.column_blocks > 1:
        (x,) = bags(p, _forward_of(call))
        p.torch(_normalise_backward, dx, x, call.dy, call.eps, call.factor, writes=[dx])
        return dx, None
    dy, weight = dense_rows(p, call.dy), dense_rows(p, call.weight)
    partials = p.new(None if wanted["dsample"] is None else Empty((tiling.column_blocks, n), torch.float32))
    p.launch(
        module.spread_bags_kernel,
        "embedding bags backward",
        tiling.grid(n if on_cuda else call.n_bags),  # a program of CUDA's kernel takes positions, one of Ascend's bags
        reads={"p_dy": dy, **_ids(p, call), "p_weight": weight},
        writes={"p_dx": dx, "p_dsample": partials},
        sizes=_sizes(call, 0 if weight is None else weight.shape[0])
        | {"s_dy": dy.strides[0], "s_weight": 0 if weight is None else weight.strides[0]},
        flags={"MEAN": call.mean},
    )
    if partials is None:
        return dx, None
    if tiling.column_blocks > 1:
        return dx, p.torch(torch.sum, partials, 0, makes=wanted["dsample"])
    return dx, p.view(partials, (n,), (1,))


def _ids(p: Plan, call: Any) -> dict[str, Any]:
    """The ids that kernels read, by their parameter."""
    ids = {"p_index": call.indices, "p_offsets": call.offsets, "p_base": call.base, "p_sample": call.sample_weights}
    return {name: p.contiguous(each) for name, each in ids.items()}


def _sizes(call: Bags | Spread, n_rows: int) -> dict[str, Any]:
    """What kernels ask of bags, by their parameter. n_rows: of the table at hand."""
    offsets = call.offsets
    return {
        "n": call.indices.numel(),
        "n_bags": call.n_bags,
        "n_offsets": 0 if offsets is None else offsets.numel(),
        "n_base": 1 if call.base is None else call.base.numel(),
        "first_row": call.first_row,
        "stop_row": call.first_row + n_rows,
        "i_padding": call.left_out,
        "factor": call.factor,
        "eps": call.eps,
    }


def _forward_of(call: Spread) -> Bags:
    """The record of the rows in fp32, before they are normalised. An id outside the table at hand names zeros."""
    of_rows = {"eps": None, "dtype": torch.float32, "row_scales": None, "n_total": _EVERY_ID}
    return derive(Bags, call, **of_rows, padding_idx=NO_ROW, scale_grad_by_freq=False, sparse=False)


def _normalise(out: Tensor, rows: Tensor, indices: Tensor, first_row: int, n_rows: int, eps: float) -> None:
    local = indices.long() - first_row
    out.copy_(reference.normalise(rows, (local >= 0) & (local < n_rows), eps))


def _normalise_backward(dx: Tensor, x: Tensor, dy: Tensor, eps: float, factor: float) -> None:
    dx.copy_(reference.normalise_backward(x, dy.float(), eps) * factor)


BAGS = Operator(LIBRARY, "bags", Bags, ["out"], plan=bags, reference=reference.bags)
SPREAD = Operator(LIBRARY, "spread", Spread, ["dx", "dsample"], plan=spread, reference=reference.spread, is_gradient=True)


class _Bags(Function):
    """Autograd of `bags`: dx and dsample by `spread`, and then the table's gradient of dx.

    Bags of equal lengths without sample weights need no `spread`: all ids of a bag read the same row of dy. Two kinds need
    it all the same: means that leave ids out, and rows that are normalised.
    """

    @staticmethod
    def forward(ctx, run, indices, offsets, base, sample_weights, weight, row_scales, options):  # type: ignore[no-untyped-def]
        call = ctx.call = Bags(None, None, None, None, None, None, *options)  # its tensors are saved
        ctx.asks = (weight.requires_grad, sample_weights is not None and sample_weights.requires_grad)
        needed = ctx.asks[1] or call.eps is not None
        save_tensors(ctx, indices, offsets, base, sample_weights, weight if needed else None)
        ctx.set_materialize_grads(False)
        ctx.n_rows = weight.shape[0]
        return run(indices, offsets, base, sample_weights, weight, row_scales, *options)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        dweight = dsample = None
        if dy is not None:
            indices, offsets, base, sample_weights, weight = ctx.saved_tensors
            call, (asks_rows, asks_weights) = ctx.call, ctx.asks
            ids = indices if base is None else (indices.view(-1, base.numel()) + base).view(-1)
            is_plain = offsets is None and sample_weights is None and call.eps is None and is_certain(ids.numel() > 0)
            if is_plain and (call.left_out == NO_ID or not call.mean):  # no `spread`
                each = ids.numel() // call.n_bags
                factor = call.factor / each if call.mean else call.factor
                wide = statistics_dtype(dy.dtype) if call.mean else dy.dtype  # models round rows that are scaled, too
                dx = dy if factor == 1 else dy.to(wide) * factor
                if each > 1:  # [each, n_bags, D], of which every part is dy
                    dx, ids = dx.expand(each, *dx.shape), ids.view(call.n_bags, each).t()
            else:
                bags = {"indices": indices, "offsets": offsets, "base": base, "sample_weights": sample_weights}
                dx, dsample = SPREAD(derive(Spread, call, dy=dy, **bags, weight=weight, need_dx=asks_rows))
                dsample = dsample.to(sample_weights.dtype) if asks_weights else None
            if asks_rows:
                dweight = gradient_of_table(call, dx, ids, ctx.n_rows, dy.dtype)
        return None, None, None, None, dsample, dweight, None, None


BAGS.autograd(lambda run, *arguments: apply(_Bags, run, *arguments[:6], arguments[6:]), as_given=True)
