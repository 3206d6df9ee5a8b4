"""The public function with a gate."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal, overload

import torch
from npu_tiling.pytorch import arguments
from npu_tiling.pytorch.sharding import is_distributed
from torch import Tensor

from . import sharding
from .checks import Options, check, output_dtype
from .operators import norm
from .reference import ACTIVATIONS
from .results import WithFP32

if TYPE_CHECKING:
    from typing_extensions import Unpack


class _GatedOptions(Options, total=False):
    activation: str
    norm_before_gate: bool


@overload
def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    return_fp32: Literal[False] = False,
    **options: Unpack[_GatedOptions],
) -> Tensor: ...


@overload
def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    return_fp32: Literal[True],
    **options: Unpack[_GatedOptions],
) -> WithFP32: ...


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    bias: Tensor | None = None,
    offset: float = 0.0,
    casting_mode: str = "llama",
    activation: str = "silu",
    norm_before_gate: bool = True,
    dtype: torch.dtype | None = None,
    return_fp32: bool = False,
) -> Tensor | WithFP32:
    """RMSNorm over the last dimension with a gate, in one pass.

        y = (x / sqrt(mean(x^2) + eps) * (offset + weight) + bias) * act(gate)

    or, norm_before_gate=False, x * act(gate) takes the place of x and y is not gated again:

        y = u / sqrt(mean(u^2) + eps) * (offset + weight) + bias        u = x * act(gate)

    Statistics and arithmetic are fp32; act(gate) is not rounded. As with `rms_norm`, the bits of a row do not depend on
    other rows, and under autocast nothing is cast.

    Args:
        x: [..., D], fp32, bf16 or fp16 (fp64 too on a CPU). Rows may lie at any stride that takes two levels (heads of a
            fused projection); others are copied first.
        gate: [..., D], x's dtype or fp32, with strides of its own.
        weight, eps, bias, offset: as for `rms_norm`.
        casting_mode: as for `rms_norm`. Where the result is gated, the weighted norm is rounded before act(gate) multiplies
            it: by "llama" to the weight's dtype, by "none" to x's.
        activation: "silu", gate * sigmoid(gate), or "sigmoid".
        norm_before_gate: whether the weighted norm is gated (Qwen3-Next, Kimi Linear) or x is (Mamba 2).
        dtype, return_fp32: as for `rms_norm`.

    Returns:
        As `rms_norm`.

    Raises:
        TypeError: an argument has a type or dtype that is not supported.
        ValueError: shapes or devices do not match, or an option is out of range.

    Source: Dao and Gu, "Transformers are SSMs", arXiv 2405.21060; mamba_ssm's RMSNormGated.
    """
    eps, offset = check(x, weight, bias, eps, offset, casting_mode)
    arguments.parameter("gate", gate, (x.shape,), x, "x's")
    arguments.one_of("activation", activation, ACTIVATIONS)
    arguments.flags(norm_before_gate=norm_before_gate)
    y_dtype = output_dtype(dtype, return_fp32, x)
    if is_distributed((x, gate, weight, bias)):
        options = {"eps": eps, "offset": offset, "casting_mode": casting_mode, "activation": activation}
        run = partial(gated_rms_norm, **options, norm_before_gate=norm_before_gate, dtype=dtype, return_fp32=return_fp32)
        parts = sharding.on_own_rows(run, {"x": x, "gate": gate}, {"weight": weight, "bias": bias})
        return WithFP32(*parts) if return_fp32 else parts
    y, _, fp32, *_ = norm(
        x,
        weight,
        bias,
        eps=eps,
        offset=offset,
        casting_mode=casting_mode,
        dtype=y_dtype,
        gate=gate,
        activation=activation,
        norm_before_gate=norm_before_gate,
        return_fp32=return_fp32,
    )
    return WithFP32(y, fp32) if return_fp32 else y
