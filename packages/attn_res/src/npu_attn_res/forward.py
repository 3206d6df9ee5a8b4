"""The plan of the forward: one launch, of whole rows, and up to three that fill a table of a list's sources.

Where rows do not fit on chip, kernels take blocks of columns (columns.py); with a prefix PyTorch's operators compute.
"""

from __future__ import annotations

from typing import Any

from npu_tiling.plans import Plan

from . import columns, reference
from .ascend import kernels as ascend
from .cuda import kernels as cuda
from .records import Forward, keeps_by_token
from .shape import Shape, Task
from .sources import followed, sources_on_chip, sources_with_prefix, stride_of, whole_rows, widest


def forward(p: Plan, call: Forward) -> tuple[Any, ...]:
    """h, its RMSNorm, the new prefix and the statistics; None for what is not asked for."""
    wanted = call.results(p.chip)
    results = {name: p.new(each) for name, each in wanted.items()}
    h, statistics = results["h"], ("score", "rstd", "lse", "norm_rstd")
    if not h.numel():
        return tuple(results.values())
    v, prefix = sources_with_prefix(p, call)
    x = followed(p, call.layer_output)
    count: Any = call.device_count
    into: Any = call.prefix if call.in_place else results["new_prefix"]
    shape = Shape(
        task=Task.FORWARD,
        width=v.width,
        itemsize=widest(h, v.blocks[0], prefix, x),
        row_stride=max(v.s_token, stride_of(prefix), stride_of(x), stride_of(into)),
        n_sources=sources_on_chip(call.n_blocks, p.chip),
        prefix=prefix is not None,
        normalised=call.output_rms_weight is not None,
        by_token=call.save and keeps_by_token(call, h.dtype, p.chip),
        aligned=v.at.aligned,
    )
    tiling = whole_rows(p, shape)
    if tiling is None:
        return columns.forward(p, call, v.in_tables(p), results) if prefix is None else _by_pytorch(p, call, wanted)
    on_cuda = p.chip.kind == "cuda"
    p.launch(
        getattr(cuda if on_cuda else ascend, tiling.kernel.name),
        str(shape),
        tiling.grid(v.n_tokens),
        reads={
            "p_v": v.at.base,
            "p_table": v.at.table,
            "p_query": p.contiguous(call.query),
            "p_norm": p.contiguous(call.rms_weight),
            "p_weight": p.contiguous(call.output_rms_weight),
            "p_count": count,
            "p_prefix": prefix,
            "p_x": x,
            **({"others": v.at.others} if on_cuda else {}),
        },
        writes={
            "p_o": h,
            "p_y": results["y"],
            **{f"p_{name}": results[name] for name in statistics},
            "p_new_prefix": into,
            "p_append": v.at.base if call.append else None,
        },
        sizes={
            "n_slots": call.n_blocks,
            "n_tokens": v.n_tokens,
            "s_block": v.s_block,
            "s_token": v.s_token,
            "eps": call.eps,
            "norm_eps": call.norm_eps,
            "s_prefix": stride_of(prefix),
            "s_x": stride_of(x),
            "s_new_prefix": stride_of(into),
        },
    )
    return tuple(results.values())


def _by_pytorch(p: Plan, call: Forward, wanted: dict[str, Any]) -> tuple[Any, ...]:
    """The definition's results, whose statistics lie [sources, T]."""
    makes = [each and each._replace(last_outermost=False) for each in wanted.values()]
    written: Any = [*(call.blocks if call.append else ()), *([call.prefix] if call.in_place else ())]
    made: tuple[Any, ...] = p.torch(_compute_forward, *call, makes=makes, writes=written)
    return made


def _compute_forward(*fields: Any) -> Any:
    return reference.compute_forward(Forward(*fields))
