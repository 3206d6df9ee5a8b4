"""Attention over depth whose values are its keys, as in Inkling 2: the public function, records and definition.

The definition computes in fp32, and in fp64 for fp64 input. Formulas: ../formula.py.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from npu_tiling import arguments
from npu_tiling.calls import Empty
from npu_tiling.dispatch import Function, apply, save_tensors, unviewed
from npu_tiling.dtensor import is_distributed
from npu_tiling.operators import Operator
from torch import Tensor

from .. import reference
from ..checks import check_output_dtype
from ..operator import LIBRARY
from ..records import gradient_flops, gradient_of
from ..reference import scaled_query


def attn_res_keys(
    bank: Tensor,
    prefix: Tensor | None,
    query: Tensor,
    rms_eps: float = 1e-6,
    scale: float = 1.0,
    *,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Inputs of a layer as softmaxes over depth whose values are the keys, for one or several queries over one read.

        v = bank[..., 0, :], ..., bank[..., N - 1, :], prefix        n_i = v_i / sqrt(mean(v_i^2) + rms_eps)
        alpha_q = softmax_i(scale <query_q, n_i>)        h_q = sum_i alpha_qi n_i

    There is no weight of the keys: `query` has it as a factor. Arithmetic is fp32, h is rounded once. The bank and the
    prefix may have dtypes of their own. A source that needs no gradient gets none; its score still counts in those of the
    others. More than 64 blocks, and on CUDA more than 16 queries, take PyTorch's operators.

    Args:
        bank: [..., N, D], fp32, bf16 or fp16 (fp64 too on a CPU), rows at any one stride; others are copied. N may be 0
            beside a prefix.
        prefix: [..., D], one more source; None: there is none.
        query: [D], or [Q, D] for Q queries.
        rms_eps, scale: as for `attn_res`.
        output_dtype: of h; None: the prefix's, or without one the bank's.

    Returns:
        h [..., D], or [Q, ..., D] for queries [Q, D].

    Raises:
        TypeError: an argument has a type or dtype that is not supported, or is a DTensor.
        ValueError: shapes or devices do not match, or a number is out of range.

    Source: `Inkling2BlockAttentionResidual` of transformers 5.23.
    """
    arguments.floating("bank", bank)
    if bank.dim() < 2 or (prefix is None and not bank.shape[-2]):  # noqa: PLR2004
        raise ValueError(
            f"bank has shape {tuple(bank.shape)} and must have shape (..., N, D), N at least 1 without a prefix."
        )
    width = bank.shape[-1]
    arguments.floating("query", query)
    if query.dim() not in (1, 2) or query.shape[-1] != width or not query.shape[0]:
        raise ValueError(f"query has shape {tuple(query.shape)} and must have shape ({width},) or (Q, {width}).")
    arguments.device("query", query, bank, "the bank's")
    if prefix is not None:
        arguments.floating("prefix", prefix)
        arguments.shape("prefix", prefix, (*bank.shape[:-2], width))
        arguments.device("prefix", prefix, bank, "the bank's")
    if output_dtype is not None:
        check_output_dtype(output_dtype)
    if is_distributed((bank, prefix, query)):
        raise TypeError("bank, prefix and query must be plain tensors: of DTensors pass what to_local() returns.")
    eps = arguments.number("rms_eps", rms_eps, least=0, finite=False)
    scale = arguments.number("scale", scale)
    like = bank if prefix is None else prefix
    is_wide = torch.float64 in (bank.dtype, like.dtype)
    queries = scaled_query(query.reshape(-1, width).to(torch.float64 if is_wide else torch.float32), scale)
    call = Keys(bank=bank, prefix=prefix, query=queries, eps=eps, dtype=output_dtype or like.dtype, save=False)
    h: Tensor = KEYS(call)[0]
    return h if query.dim() > 1 else h.squeeze(0)


class Keys(NamedTuple):
    """h_q of every query.

    Attributes:
        bank: [..., N, D].
        prefix: [..., D], one more source; None: there is none.
        query: g, fp32 [Q, D].
        eps: added to the mean squares.
        dtype: of h.
        save: whether to return s and r for a backward.
    """

    bank: Tensor
    prefix: Tensor | None
    query: Tensor
    eps: float
    dtype: torch.dtype
    save: bool

    @property
    def n_sources(self) -> int:
        return self.bank.shape[-2] + int(self.prefix is not None)

    def results(self) -> dict[str, Empty | None]:
        """h [Q, ..., D]; s and r of each query and source, [T, Q, sources]: r is the same for every query."""
        *leading, _, width = self.bank.shape
        n_queries = self.query.shape[0]
        statistics = Empty((prod(leading), n_queries, self.n_sources), self.query.dtype) if self.save else None
        return {"h": Empty((n_queries, *leading, width), self.dtype), "score": statistics, "rstd": statistics}

    def flops(self) -> int:
        """Of the products of each query: <g, n_i> of each source, and the sum of alpha_i n_i."""
        return 4 * self.query.numel() * self.n_sources * prod(self.bank.shape[:-2])


class KeysBackward(NamedTuple):
    """The gradients of the bank, the prefix and g.

    Attributes:
        dh: the gradient of h.
        bank, prefix, query: the forward's.
        score, rstd: the forward's statistics.
        need_bank, need_prefix, need_query: which of them need a gradient.
    """

    dh: Tensor
    bank: Tensor
    prefix: Tensor | None
    query: Tensor
    score: Tensor
    rstd: Tensor
    need_bank: bool
    need_prefix: bool
    need_query: bool

    @property
    def n_sources(self) -> int:
        return self.score.shape[-1]

    def results(self) -> dict[str, Empty | None]:
        """The gradients; None where not needed."""
        return {
            "dbank": gradient_of(self.bank, self.need_bank),
            "dprefix": gradient_of(self.prefix, self.need_prefix),
            "dquery": gradient_of(self.query, self.need_query),
        }

    def flops(self) -> int:
        """See `gradient_flops`."""
        n_needed = self.bank.shape[-2] * int(self.need_bank) + int(self.need_prefix)
        return gradient_flops(self.score, self.query.shape[-1], self.n_sources, n_needed, self.need_query)


class _Call(NamedTuple):
    """What reference.Sources reads of a record."""

    blocks: list[Tensor]
    prefix: Tensor | None
    need_blocks: list[bool]
    need_prefix: bool
    stacked: bool = True


def _sources(call: Any, need_bank: bool = False, need_prefix: bool = False) -> reference.Sources:
    return reference.Sources(_Call([call.bank.movedim(-2, 0)], call.prefix, [need_bank], need_prefix))


def compute_keys(call: Keys) -> tuple[Tensor | None, ...]:
    """See `Keys.results`."""
    v, n_queries = _sources(call), call.query.shape[0]
    score, rstd = v.scores(call.query.to(v.dtype), call.eps)  # [sources, T, Q], [sources, T]
    rstd = rstd.unsqueeze(-1)
    alpha, _ = reference.softmax(score)
    h = v.weighted_sum(alpha * rstd, call.dtype).movedim(1, 0).contiguous()
    shape = (n_queries, *call.bank.shape[:-2], v.width)
    statistics = (_by_token(score), _by_token(rstd.expand_as(score))) if call.save else (None, None)
    return h.view(shape), *statistics


def compute_keys_backward(call: KeysBackward) -> tuple[Tensor | None, ...]:
    """See `KeysBackward.results`."""
    v = _sources(call, call.need_bank, call.need_prefix)
    score, rstd = call.score.movedim(-1, 0), call.rstd.movedim(-1, 0)  # [sources, T, Q]
    do = call.dh.reshape(len(call.dh), -1, v.width).movedim(0, 1)  # [T, Q, D]
    e = v.products(do) * rstd
    alpha, _ = reference.softmax(score)
    ds = alpha * (e - (alpha * e).sum(0))
    coefficient = ((alpha * e + ds * score) * rstd.square()).sum(-1) / v.width
    dquery = v.gradients(do, call.query.to(v.dtype), alpha * rstd, ds * rstd, coefficient)
    (dbank,) = v.dv
    return (
        None if dbank is None else dbank.movedim(0, -2).contiguous(),
        v.dprefix_sum if call.need_prefix else None,
        dquery.to(call.query.dtype).contiguous() if call.need_query else None,
    )


def _by_token(statistic: Tensor) -> Tensor:
    return statistic.movedim(0, -1).contiguous()


KEYS = Operator(
    LIBRARY,
    "keys",
    Keys,
    ["h", "score", "rstd"],
    plan=f"{__package__}.plans:keys",
    reference=compute_keys,
    forward_mode=True,
)
KEYS_BACKWARD = Operator(
    LIBRARY,
    "keys_backward",
    KeysBackward,
    ["dbank", "dprefix", "dquery"],
    plan=f"{__package__}.plans:keys_backward",
    reference=compute_keys_backward,
    forward_mode=True,
    is_gradient=True,
)


class _Keys(Function):
    @staticmethod
    def forward(ctx, run, bank, prefix, query, eps, dtype, save):  # type: ignore[no-untyped-def]
        save_statistics = True
        h, score, rstd = run(bank, prefix, query, eps, dtype, save_statistics)
        h = unviewed(h)
        save_tensors(ctx, bank, prefix, query, score, rstd)
        ctx.set_materialize_grads(False)
        if not save:
            return h, None, None
        ctx.mark_non_differentiable(score, rstd)
        return h, score, rstd

    @staticmethod
    def backward(ctx, dh, *_):  # type: ignore[no-untyped-def]
        _, need_bank, need_prefix, need_query, *_ = ctx.needs_input_grad
        if dh is None:
            return (None,) * 7
        gradients = KEYS_BACKWARD(KeysBackward(dh, *ctx.saved_tensors, need_bank, need_prefix, need_query))
        return None, *gradients, None, None, None


KEYS.autograd(partial(apply, _Keys))
