"""What a call launches on a chip, and why, with neither tensors' data nor a device: `python -m npu_rms_norm explain`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from npu_tiling import Device
from npu_tiling.command import Dtype, check_sizes, chosen_chip, gradients, leaf, nbytes
from npu_tiling.explaining import Explanation
from npu_tiling.explaining import explain as explain_run
from torch import Tensor

from .api import add_rms_norm, add_rms_norm_dynamic_quant, gated_rms_norm, qk_rms_norm, rms_norm, rms_norm_dynamic_quant

_EIGHT_BITS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}

NAMES = {
    "N": "columns of a row",
    "BLOCK_N": "columns of a tile",
    "BLOCK_M": "partial sums that are added at a time",
    "G": "groups of a tile; rows of one group have one stride",
    "M": "rows of a tile; on Ascend, of each group in it",
    "SPLIT": "programs share equal parts of the rows (rows), tiles in turn (tiles), or the rows of a head (heads)",
    "ORDER": "rows are of one group (one), go by groups (groups) or tokens (tokens), or a program's are of one head (heads)",
    "NORMALISED": "what the normalised row is rounded to; fp32: not rounded",
    "FACTORS": "what rstd, weight and bias are rounded to",
    "WEIGHTED": "what the weighted row is rounded to",
    "ACTIVATION": "of the gate; -: there is none",
    "GATE_FIRST": "x is gated, and not the norm",
    "PARTS": "programs that share a row, padded to a power of two",
}
"""What sizes and flags of the kernels are."""


@torch.inference_mode(False)
def explain(
    *,
    tokens: int,
    width: int,
    dtype: Dtype = "bf16",
    chip: str | Device | None = None,
    backward: bool = False,
    residual: bool = False,
    gate: bool = False,
    norm_before_gate: bool = True,
    activation: Literal["silu", "sigmoid"] = "silu",
    bias: bool = False,
    heads: int | None = None,
    kv_heads: int | None = None,
    pitch: int | None = None,
    casting_mode: Literal["llama", "gemma", "none"] = "llama",
    weight_dtype: Dtype | None = None,
    quantised: Literal["int8", "fp8"] | None = None,
    return_fp32: bool = False,
) -> Explanation:
    """Explains which kernels a norm launches on a chip, with which tiles, and why.

    Args:
        tokens: rows of x, over all heads.
        width: elements of a row.
        dtype: of x, the gate and the residual.
        chip: a chip, or its name in `npu_tiling.SOCS` or `npu_tiling.GPUS`; None: the chip in this machine.
        backward: the backward too.
        residual: as `add_rms_norm`.
        gate: as `gated_rms_norm`.
        activation: of the gate.
        norm_before_gate: whether the weighted norm is gated, or x is.
        bias: a bias is added.
        heads: a weight for each of so many heads.
        kv_heads: as `qk_rms_norm`, for q with `heads` heads, which `tokens` counts; k and v have so many each.
        pitch: elements from one token's heads to the next token's, in a wider tensor.
        casting_mode: what is rounded to x's dtype on the way.
        weight_dtype: of weight and bias (default: dtype).
        quantised: the result in 8 bits, with a scale for each row.
        return_fp32: y in fp32 too.

    Returns:
        An Explanation; `text` is for people.

    Raises:
        UnknownDeviceError: the chip is not known, or none is named where there is none.
        ValueError: no call has these options.
    """
    check_sizes(tokens=tokens, width=width, heads=heads, kv_heads=kv_heads, pitch=pitch)
    if tokens % (heads or 1):
        raise ValueError(f"tokens is {tokens} and must be a multiple of heads, {heads}.")
    if pitch is not None and pitch < width * (heads or 1):
        raise ValueError(f"pitch is {pitch} and must be at least a token's elements, {width * (heads or 1)}.")
    if (gate and (residual or quantised)) or (quantised and (backward or return_fp32)):
        raise ValueError("gate goes with neither residual nor quantised, quantised with neither backward nor return_fp32.")
    if kv_heads is not None:
        if heads is None or gate or residual or quantised or bias or return_fp32 or pitch:
            raise ValueError("kv_heads goes with heads, and with no other option of x or y.")
        qkv = leaf(tokens // heads, (heads + 2 * kv_heads) * width, dtype=dtype, gradient=backward)
        q_weight, k_weight = both = [leaf(width, dtype=weight_dtype or dtype, gradient=backward) for _ in range(2)]

        def run_projection() -> Mapping[str, int]:
            found = qk_rms_norm(qkv, q_weight, k_weight, heads, kv_heads, casting_mode=casting_mode)
            normalised = nbytes((found.q, found.k))
            moved = {"forward": 2 * normalised + nbytes(both)}  # v is not read
            if backward:
                moved["backward"] = nbytes((*found, *both)) + normalised + nbytes(gradients(found, (qkv, *both)))
            return moved

        named = f"RMSNorm of q and k, {tokens // heads} tokens in {dtype},"
        return explain_run(named, run_projection, chosen_chip(chip), names=NAMES)
    x = _rows(tokens, width, dtype, heads, pitch).requires_grad_(backward)
    other = _rows(tokens, width, dtype, heads).requires_grad_(backward) if gate or residual else None
    shape = (width,) if heads is None else (heads, width)
    weight, added = [leaf(*shape, dtype=weight_dtype or dtype, gradient=backward) for _ in range(2)]
    inputs = [x, other, weight, added if bias else None]
    options: dict[str, Any] = {"bias": inputs[3], "casting_mode": casting_mode}
    if quantised:
        options["dtype"] = _EIGHT_BITS[quantised]
        function: Callable[..., Any] = add_rms_norm_dynamic_quant if residual else rms_norm_dynamic_quant
    else:
        options["return_fp32"] = return_fp32
        function = gated_rms_norm if gate else add_rms_norm if residual else rms_norm
    if gate:
        options |= {"norm_before_gate": norm_before_gate, "activation": activation}

    def run() -> Mapping[str, int]:
        found = function(*filter(lambda each: each is not None, inputs[:3]), **options)
        results: Sequence[Tensor] = (found,) if isinstance(found, Tensor) else found
        moved = {"forward": nbytes((*inputs, *results))}
        if backward:
            # The backward reads the new residual, which is a result, in place of x and the residual.
            read = (results[1], *inputs[2:]) if residual else inputs
            moved["backward"] = nbytes((*results, *read, *gradients(results, inputs)))
        return moved

    named = "RMSNorm of x + residual" if residual else "gated RMSNorm" if gate else "RMSNorm"
    return explain_run(f"{named}, {tokens} x {width} in {dtype},", run, chosen_chip(chip), names=NAMES)


def _rows(tokens: int, width: int, dtype: str, heads: int | None, pitch: int | None = None) -> Tensor:
    """[tokens, width], or [tokens / heads, heads, width], whose tokens lie `pitch` elements apart."""
    if heads is None:
        return leaf(tokens, pitch or width, dtype=dtype, gradient=False)[:, :width]
    return leaf(tokens // heads, pitch or heads * width, dtype=dtype, gradient=False)[:, : heads * width].unflatten(
        1, (heads, width)
    )
