"""Attention over depth whose values are its keys, as in Inkling 2: the public function, which checks its arguments."""

from __future__ import annotations

import torch
from npu_tiling import arguments
from npu_tiling.dtensor import is_distributed
from torch import Tensor

from ..checks import check_output_dtype
from ..reference import scaled_query
from .operator import KEYS, Keys


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
    others. More than 64 blocks take PyTorch's operators.

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
