"""The plans of q's and k's norms in a fused projection of q, k and v.

Forward: a launch of `rms_norm`'s forward for q, and one for k. Backward: the gradients of q, k and v are slices of one
tensor, and every launch writes its slice in place. On CUDA one launch writes all three if `_in_one_launch` can; else a
backward of `rms_norm` writes that of q, another one that of k, and PyTorch copies that of v.

Experimental: no model that `patch` knows keeps q, k and v in one projection for its norms.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from npu_tiling.calls import Empty, contiguous_strides
from npu_tiling.partials import add_partials
from npu_tiling.plans import Plan, Slot
from npu_tiling.rows import layout_of
from torch import Tensor

from .call import QK, Backward, QKBackward
from .cuda import QK_BACKWARD_RULE, qk_backward_kernel
from .plans import Rows, backward, forward, rows_of

NAME = "qk_rms_norm backward"


class Part(NamedTuple):
    """The heads of q, k or v in a row of the projection: the first one and their number."""

    first: int
    heads: int

    def of(self, p: Plan, qkv: Any, width: int) -> Any:
        """A view [..., heads, width] of this part of the projection or of its gradient."""
        *leading, last = qkv.strides
        return p.view(qkv, (*qkv.shape[:-1], self.heads, width), (*leading, width * last, last), self.first * width * last)


def parts(n_heads: int, n_kv_heads: int) -> tuple[Part, Part, Part]:
    """The parts of q, k and v."""
    return Part(0, n_heads), Part(n_heads, n_kv_heads), Part(n_heads + n_kv_heads, n_kv_heads)


def qk_forward(p: Plan, call: QK) -> tuple[Slot | None, ...]:
    """q, k, and rstd of both."""
    q_part, k_part, _ = parts(call.n_heads, call.n_kv_heads)
    width = call.qkv.shape[-1] // (call.n_heads + 2 * call.n_kv_heads)
    found = []
    for part, weight in ((q_part, call.q_weight), (k_part, call.k_weight)):
        heads = part.of(p, call.qkv, width)
        rows = _rows(p, heads, weight)
        y, _, _, rstd, _ = forward(p, call.norm(rows, weight))
        found.append((y if rows is heads else p.view(y, heads.shape, contiguous_strides(heads.shape)), rstd))
    (q, q_rstd), (k, k_rstd) = found
    return q, k, q_rstd, k_rstd


def qk_backward(p: Plan, call: QKBackward) -> tuple[Slot | None, ...]:
    """The gradients of the projection and of both weights; None for what is not asked for."""
    dqkv, all_parts = p.new(call.results()["dqkv"]), parts(call.n_heads, call.n_kv_heads)
    width = call.qkv.shape[-1] // (call.n_heads + 2 * call.n_kv_heads)
    into: list[Any] = [None if dqkv is None else part.of(p, dqkv, width) for part in all_parts]
    given: list[Any] = [call.dq, call.dk, call.dv]
    of_q, of_k = (call.q_weight, call.q_rstd, call.need_dq_weight), (call.k_weight, call.k_rstd, call.need_dk_weight)
    norms: list[Any] = [None, None]
    for i, (weight, rstd, need_dweight) in enumerate((of_q, of_k)):
        if given[i] is not None:
            x = _rows(p, all_parts[i].of(p, call.qkv, width), weight)
            norms[i] = call.norm(_rows(p, given[i], weight), x, weight, rstd, need_dweight)
    rows_into = [
        None if each is None else _rows(p, each, weight)
        for each, weight in zip(into, (call.q_weight, call.k_weight), strict=False)
    ]
    if dqkv is not None and None not in given and given[2].numel() and p.chip.kind == "cuda":
        dweights = _in_one_launch(p, norms, given[2], [*rows_into, into[2]])
        if dweights is not None:
            return dqkv, *dweights
    if dqkv is not None and given[2] is not None:
        p.torch(copy_rows, into[2], given[2], writes=[into[2]])
    for dy, each in zip(given, into, strict=True):
        if each is not None and dy is None:
            p.torch(torch.Tensor.zero_, each, writes=[each])
    dweights = [None if norm is None else backward(p, norm, each)[2] for norm, each in zip(norms, rows_into, strict=True)]
    return dqkv, *dweights


def _rows(p: Plan, heads: Any, weight: Any) -> Any:
    """The rows that are normalised: each head or, where a weight is as wide as all heads, the heads of a token together."""
    if weight is None or weight.shape[0] == heads.shape[-1]:
        return heads
    *leading, n_heads, width = heads.shape
    column = heads.strides[-1] if width > 1 else heads.strides[-2]
    if n_heads > 1 and heads.strides[-2] != width * column:
        return p.view(p.contiguous(heads), (*leading, n_heads * width), contiguous_strides((*leading, n_heads * width)))
    return p.view(heads, (*leading, n_heads * width), (*heads.strides[:-2], column))


def _in_one_launch(p: Plan, norms: Sequence[Any], dv: Slot, into: Sequence[Any]) -> list[Slot | None] | None:
    """Adds one launch that writes the gradients of q, k and v to `into`. Returns those of the weights of q and of k.

    Where one launch cannot write all three, it returns None and adds no step.
    """
    q, k = norms
    q_rows, k_rows = (
        rows_of(each, {"dy": each.dy, "dsum": None, "x": each.x, "gate": None, "dx": dx}, dx, p.chip)
        for each, dx in zip(norms, into, strict=False)
    )
    v_rows = layout_of(dv.shape, (dv.strides, into[2].strides))
    if v_rows is None or not _lie_alike(q, q_rows, k, k_rows) or (v_rows.n_outer, v_rows.n_inner) != k_rows.counts:
        return None
    if v_rows.strides[1] != k_rows.strides["dx"]:
        return None
    of_q: Any = q_rows.tiling
    rows = max(1, int(QK_BACKWARD_RULE.size) // of_q.columns)
    warps, per_core = QK_BACKWARD_RULE.warps, QK_BACKWARD_RULE.per_core
    tiling = p.decide(NAME, dataclasses.replace(of_q, rule=QK_BACKWARD_RULE, rows=rows, warps=warps, per_core=per_core))
    (n_outer, n_q_inner), (_, n_k_inner) = q_rows.counts, k_rows.counts
    # Programs for q, k and v in proportion to the bytes that they move, and not more than tiles.
    moved, resident = (3 * n_q_inner, 3 * n_k_inner, 2 * n_k_inner), p.chip.vector_cores * tiling.per_core
    n_q, n_k, n_v = (
        max(1, min(-(-n_outer * each // tiling.rows), resident * share // sum(moved)))
        for each, share in zip((n_q_inner, n_k_inner, n_k_inner), moved, strict=True)
    )
    dweights = [p.new(each.results()["dweight"]) for each in norms]
    sums = p.new(Empty((n_q + n_k, dv.shape[-1]), torch.float32) if any(dweights) else None)
    strides = {"dq": q_rows.strides["dy"], "dk": k_rows.strides["dy"], "dv": v_rows.strides[0]}
    strides |= {name: q_rows.strides[name] for name in ("x", "dx")}
    p.launch(
        qk_backward_kernel,
        NAME,
        n_q + n_k + n_v,
        reads={
            "p_dq": q.dy,
            "p_dk": k.dy,
            "p_dv": dv,
            "p_q": q.x,
            "p_k": k.x,
            "p_q_weight": p.contiguous(q.weight),
            "p_k_weight": p.contiguous(k.weight),
            "p_q_rstd": p.contiguous(q.rstd),
            "p_k_rstd": p.contiguous(k.rstd),
        },
        writes={"p_dx_q": into[0], "p_dx_k": into[1], "p_dx_v": into[2], "p_dw": sums},
        sizes={
            "n_outer": n_outer,
            "n_q_inner": n_q_inner,
            "n_k_inner": n_k_inner,
            "n_q": n_q,
            "n_k": n_k,
            **{f"s_{name}_{level}": of[i] for name, of in strides.items() for i, level in enumerate(("outer", "inner"))},
            "offset": q_rows.offset,
        },
    )
    for name, dweight, first, count in (("q", dweights[0], 0, n_q), ("k", dweights[1], n_q, n_k)):
        if dweight is not None:
            width = dv.shape[-1]
            own = p.view(sums, (count, width), (width, 1), first * width)
            add_partials(p, f"sum of {name}'s p_dw", own, dweight)
    return dweights


def _lie_alike(q: Backward, q_rows: Rows, k: Backward, k_rows: Rows) -> bool:
    """Whether one launch can take the rows of q and of k: equal strides, dtypes, tile and constants."""
    both = (q_rows, k_rows)
    dtypes = {(each.dy.dtype, None if each.weight is None else each.weight.dtype) for each in (q, k)}
    return (
        not any(each.copied or each.tiling.kernel != "rows" or each.tiling.rows == 1 for each in both)
        and q_rows.tiling.constants == k_rows.tiling.constants
        and q_rows.counts[0] == k_rows.counts[0]
        and q_rows.offset == k_rows.offset
        and all(q_rows.strides[name] == k_rows.strides[name] for name in ("x", "dx"))
        and len(dtypes) == 1
    )


def copy_rows(into: Tensor, rows: Tensor) -> None:
    """Copies rows of any strides; on CUDA as 64-bit integers where it can: a thread of PyTorch's copies one element."""
    if rows.is_cuda and rows.dtype == into.dtype and has_words(into) and has_words(rows):
        into, rows = into.view(torch.int64), rows.view(torch.int64)
    into.copy_(rows)


def has_words(tensor: Tensor) -> bool:
    """Whether each row of a tensor is a whole number of aligned 64-bit integers."""
    per_word, (*strides, last) = 8 // tensor.element_size(), tensor.stride()
    distances = (tensor.shape[-1], tensor.storage_offset(), *strides)
    return last == 1 and tensor.data_ptr() % 8 == 0 and not any(distance % per_word for distance in distances)
