"""What a call launches on a chip, and why, with neither tensors' data nor a device: `python -m npu_attn_res explain`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from npu_tiling import Device, arguments
from npu_tiling.command import Dtype, check_sizes, chosen_chip, computed, gradients, leaf, nbytes
from npu_tiling.explaining import Explanation
from npu_tiling.explaining import explain as explain_run
from torch import Tensor

from .api import attn_res
from .bank import attn_res_bank
from .keys import attn_res_keys
from .two_phase import attn_res_merge, attn_res_phase1

NAMES = {
    "D": "columns of a row",
    "Q": "queries",
    "N": "columns of a row of partial sums",
    "S": "layers",
    "ROWS": "tokens of a tile times queries",
    "BLOCK_M": "tokens of a tile; partial sums that are added at a time",
    "BLOCK_N": "sources of a tile; columns of partial sums",
    "BLOCK_S": "layers of a tile",
    "BLOCK_D": "columns of a tile",
    "STAGES": "tiles under way",
    "ALIGNED": "distances in a table of blocks are multiples of 16 elements, or there is no table",
    "BY_TOKEN": "statistics are [tokens, sources], else [sources, tokens]",
    "HALVES": "a row comes as two halves",
    "HELD": "a program has all sources of a token in registers; else it loops over them",
    "PARTS": "programs that share a token, padded to a power of two",
    "TILES": "sets of sources, which programs that share a token divide",
    "PER_TILE": "sources of a set",
    "VECTOR": "adjacent columns of a thread",
}
"""What sizes and flags of the kernels are."""


@torch.inference_mode(False)
def explain(
    *,
    tokens: int,
    width: int,
    blocks: int = 8,
    dtype: Dtype = "bf16",
    chip: str | Device | None = None,
    backward: bool = False,
    listed: bool = False,
    prefix: bool = False,
    append: bool = False,
    layers: int | None = None,
    queries: int | None = None,
    merge: bool = False,
    layer_output: bool = False,
    normalised: bool = False,
    weight_dtype: Dtype | None = None,
) -> Explanation:
    """Explains which kernels Attention Residuals launch on a chip, with which tiles, and why.

    Args:
        tokens: rows of a block.
        width: elements of a row.
        blocks: finished blocks.
        dtype: of blocks, prefix and layer output.
        chip: a chip, or its name in `npu_tiling.SOCS` or `npu_tiling.GPUS`; None: the chip in this machine.
        backward: the backward too.
        listed: the blocks are a list, and not one tensor.
        prefix: as `attn_res_bank`.
        append: with prefix, of a bank in one tensor: the launch writes the prefix (and layer output) as its next block too.
        layers: as `attn_res_phase1`, with so many queries.
        queries: as `attn_res_keys`, with so many queries; with prefix, an fp32 prefix too, and fp32 results in any case.
        merge: as `attn_res_merge`.
        layer_output: of a bank or a merge: a layer's output is added to the prefix.
        normalised: an RMSNorm of the result follows.
        weight_dtype: of query and weights (default: dtype).

    Returns:
        An Explanation; `text` is for people.

    Raises:
        UnknownDeviceError: the chip is not known, or none is named where there is none.
        ValueError: no call has these options.
    """
    check_sizes(tokens=tokens, width=width, layers=layers, queries=queries)
    arguments.whole("blocks", blocks, least=0 if prefix or merge else 1)
    if sum((prefix, layers is not None, merge)) > 1 or (layer_output and not (prefix or merge)):
        raise ValueError("prefix, layers and merge exclude one another, and layer_output goes with prefix or merge.")
    if queries is not None and (listed or append or layers is not None or merge or layer_output or normalised):
        raise ValueError(
            "queries goes with prefix alone: leave listed, append, layers, merge, layer_output and normalised out."
        )
    if append and (listed or not prefix):
        raise ValueError("append needs prefix and a bank in one tensor: leave listed out.")
    if normalised and layers is not None:
        raise ValueError("normalised does not go with layers.")

    def rows(*shape: int) -> Tensor:
        return leaf(*shape, dtype=dtype, gradient=backward)

    query, norm, output_norm = (leaf(width, dtype=weight_dtype or dtype, gradient=backward) for _ in range(3))
    sources = (
        []
        if merge
        else [rows(tokens, width) for _ in range(blocks)]
        if listed
        else [rows(*((tokens, blocks) if queries is not None else (blocks + append, tokens)), width)]
    )
    state = [leaf(tokens, *shape, dtype="fp32", gradient=backward) for shape in ((width,), ())] if merge else []
    running = leaf(tokens, width, dtype=dtype if queries is None else "fp32", gradient=backward)
    output = rows(tokens, width) if layer_output else None
    several = layers or queries
    asking = query if several is None else leaf(several, width, dtype="fp32", gradient=backward)
    inputs = [
        *sources,
        *state,
        running if prefix or merge else None,
        output,
        asking,
        None if queries is not None else norm,
        output_norm if normalised else None,
    ]
    options: dict[str, Any] = {"output_rms_weight": inputs[-1]}

    def run() -> Mapping[str, int]:
        v: Any = sources if listed else sources[0] if sources else None
        results: Sequence[Tensor | None]
        if merge:
            o, lse = state
            results = attn_res_merge(o, lse, running, query, norm, layer_output=output, **options)
        elif layers is not None:
            results = attn_res_phase1(asking, v, norm)
        elif queries is not None:
            last = running if prefix else None
            results = (attn_res_keys(v, last, asking, output_dtype=torch.float32),)
        elif prefix:
            bank = v if listed else computed(v).movedim(0, -2) if append else v.movedim(0, -2)
            count = blocks if append else None
            results = attn_res_bank(bank, count, running, query, norm, layer_output=output, append=append, **options)
        else:
            h = attn_res(v, query, norm, **options)
            results = (h,) if isinstance(h, Tensor) else h
        results = [result for result in results if result is not None and result is not running]
        moved = {"forward": nbytes((*inputs, *results))}
        if backward:
            # The backward reads the new prefix, which is a result, in place of the prefix and the layer's output.
            read = [tensor for tensor in inputs if output is None or (tensor is not running and tensor is not output)]
            moved["backward"] = nbytes((*results, *read, *gradients(results, inputs)))
        return moved

    bank_named = "bank, appended to," if append else "bank"
    named = (
        "merge"
        if merge
        else f"phase 1 of {layers} layers"
        if layers is not None
        else f"keys as values, {queries} quer{'y' if queries == 1 else 'ies'}{' and a prefix' * prefix}"
        if queries is not None
        else bank_named
        if prefix
        else "attn_res"
    )
    lying = "" if merge else f" over {blocks} blocks, {'a list' if listed else 'one tensor'}"
    return explain_run(f"{named}{lying}, {tokens} x {width} in {dtype},", run, chosen_chip(chip), names=NAMES)
