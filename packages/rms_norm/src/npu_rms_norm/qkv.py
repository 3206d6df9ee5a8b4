"""The public function for the norms of q and k of a fused projection."""

from __future__ import annotations

from functools import partial

from npu_tiling.pytorch import arguments
from npu_tiling.pytorch.sharding import is_distributed
from torch import Tensor

from . import sharding
from .casting import CASTING_MODES
from .qk_operators import OPERATORS
from .results import QKV


def qk_rms_norm(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    n_heads: int,
    n_kv_heads: int | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str = "llama",
) -> QKV:
    """`rms_norm` of the queries and of the keys of a fused projection, whose gradient is written once, into one tensor.

        q, k, v = split(qkv)        q = rms_norm(q, q_weight)        k = rms_norm(k, k_weight)

    Two calls of `rms_norm` on slices give the same q and k, and leave it to autograd to fill a gradient of the projection's
    size with zeros for each slice, and to add the three.

    Args:
        qkv: [..., (n_heads + 2 n_kv_heads) D], what one linear layer computes: the heads of q, those of k, those of v. fp32,
            bf16 or fp16 (fp64 too on a CPU).
        q_weight: [D], each head normalised by itself (Qwen3), or [n_heads D], all of a token together (OLMo 2); qkv's dtype
            or fp32; None leaves it out, and each head is normalised by itself.
        k_weight: [D] or [n_kv_heads D], as q_weight.
        n_heads: of q.
        n_kv_heads: of k, and of v; None: n_heads.
        eps, offset, casting_mode: as for `rms_norm`, of both.

    Returns:
        A tuple with names: q [..., n_heads, D] and k [..., n_kv_heads, D], contiguous, and v [..., n_kv_heads, D], a view of
        qkv. Attention takes them with `transpose(-3, -2)`.

    Raises:
        TypeError: an argument has a type or dtype that is not supported.
        ValueError: shapes or devices do not match, or an option is out of range.

    Source: Dehghani et al., "Scaling Vision Transformers to 22 Billion Parameters", arXiv 2302.05442; arXiv 1910.07467.
    """
    arguments.rows("qkv", qkv)
    n_heads = arguments.whole("n_heads", n_heads, least=1)
    n_kv_heads = arguments.whole("n_kv_heads", n_kv_heads, least=1, or_none=True) or n_heads
    heads = n_heads + 2 * n_kv_heads
    width = qkv.shape[-1] // heads
    if width * heads != qkv.shape[-1]:
        raise ValueError(
            f"qkv has a last dimension of {qkv.shape[-1]} and must have a multiple of {heads}, "
            "the heads of q, k and v: n_heads + 2 * n_kv_heads."
        )
    for name, weight, own in (("q_weight", q_weight, n_heads), ("k_weight", k_weight, n_kv_heads)):
        arguments.parameter(name, weight, ((width,), (own * width,)), qkv, "qkv's", or_none=True)
    arguments.one_of("casting_mode", casting_mode, tuple(CASTING_MODES))
    eps, offset = arguments.number("eps", eps, least=0, finite=False), arguments.number("offset", offset)
    options = (n_heads, n_kv_heads, eps, offset, casting_mode)
    if is_distributed((qkv, q_weight, k_weight)):
        run = partial(_local, options)
        return QKV(*sharding.on_own_rows(run, {"qkv": qkv}, {"q_weight": q_weight, "k_weight": k_weight}))
    return QKV(*OPERATORS("qkv", qkv, q_weight, k_weight, *options))


def _local(options: tuple[int, int, float, float, str], qkv: Tensor, **weights: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(OPERATORS("qkv", qkv, *weights.values(), *options))
