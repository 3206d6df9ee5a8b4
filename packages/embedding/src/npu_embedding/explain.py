"""What a look-up launches on a chip, and why, with neither tensors' data nor a device: `python -m npu_embedding explain`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from npu_tiling import Device
from npu_tiling.command import Dtype, check_sizes, chosen_chip, gradients, leaf, nbytes
from npu_tiling.explaining import Explanation
from npu_tiling.explaining import explain as explain_run
from torch import Tensor

from .api import embedding
from .bags import embedding_bag
from .ngram import ngram_embedding

NAMES = {
    "N": "columns of the table",
    "BLOCK_M": "rows, tokens or indices of a tile",
    "BLOCK_N": "columns of a tile",
    "GATHER": "a tile of rows moves at once where the table has all of them",
    "TILES": "the rows of a tile of tokens or bags move at once",
    "SINGLE": "a bag has one id",
    "NAN": "the bits of a NaN",
    "LOG": "2^LOG indices are a group, which a program sorts or searches at once",
    "KEY_OF_ROW_0": "the key of row 0; that of row r is r more",
    "LONG": "indices are int64",
    "WIDE": "keys need two sorts; on CUDA, an int64 for a key and its place",
    "BITS": "a step of a search looks at 2^BITS keys",
    "STEPS": "a sorted run has 2^STEPS keys",
    "SET": "sorted runs that become one; 0: all",
    "BLOCK_G": "runs that are searched at a time",
    "BLOCK_Z": "marks that a program clears at a time",
    "ZERO_M": "rows that a program of zeros stores at a time",
    "ZERO_N": "columns that it stores at a time",
    "BLOCK_K": "rows of dy that are added at a time",
    "BLOCK_C": "borders between chunks that a program looks at",
    "BLOCK_P": "partial sums that are added at a time",
    "SCALE_BY_COUNT": "scale_grad_by_freq",
    "IN_PARTS": "rows of dy lie in parts, with one stride in a part and another from part to part",
    "CONTEXT": "ids before a token's that its n-grams take",
    "HEADS": "of n-grams of each length",
    "ADD": 'the hash adds its products (mix "sum"); else it combines them by exclusive or',
    "OWN": "each head has multipliers of its own",
    "CONCAT": "rows of all heads stand side by side; else they are added",
    "FORMAT": "of 8-bit floats of the table; -: none",
    "PART": "ids of a part of a longer bag; 0: no bag is longer",
    "BLOCK_B": "bags that a program looks at for long ones",
    "MEAN": "a bag's sum is divided by the number of its ids",
}
"""What sizes and flags of the kernels are."""


@torch.inference_mode(False)
def explain(
    *,
    tokens: int,
    vocabulary: int,
    width: int,
    dtype: Dtype = "bf16",
    chip: str | Device | None = None,
    backward: bool = False,
    pitch: int | None = None,
    padding_idx: int | None = None,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    multiplier: float | None = None,
    rms_norm_eps: float | None = None,
    bag: int | None = None,
    bags: int | None = None,
    mode: Literal["sum", "mean", "concat"] | None = None,
    per_sample_weights: bool = False,
    ngram_size: int | None = None,
    heads: int = 16,
) -> Explanation:
    """Explains which kernels a look-up launches on a chip, with which tiles, and why.

    Args:
        tokens: indices.
        vocabulary: rows of the table.
        width: elements of a row.
        dtype: of the table.
        chip: a chip, or its name in `npu_tiling.SOCS` or `npu_tiling.GPUS`; None: the chip in this machine.
        backward: the backward too.
        pitch: elements from one row to the next, in columns of a wider table.
        padding_idx: this row gets no gradient.
        scale_grad_by_freq: the gradient of a row is divided by how many indices name it.
        sparse: the gradient has an entry for each index.
        multiplier: of every row.
        rms_norm_eps: of the RMSNorm of every row; None: no RMSNorm.
        bag: as `embedding_bag`, with bags of so many indices.
        bags: the same with offsets: so many bags of any lengths.
        mode: of bags, None: "mean"; or of an n-gram look-up, None: "concat".
        per_sample_weights: of bags: each index has a weight, with a gradient; mode "sum".
        ngram_size: of an n-gram look-up; None: indices are given.
        heads: of all n-grams; a row is one head's.

    Returns:
        An Explanation; `text` is for people.

    Raises:
        UnknownDeviceError: the chip is not known, or none is named where there is none.
        ValueError: no call has these options.
    """
    check_sizes(tokens=tokens, vocabulary=vocabulary, width=width, pitch=pitch, bag=bag, bags=bags, ngram_size=ngram_size)
    check_sizes(heads=heads)
    if pitch is not None and pitch < width:
        raise ValueError(f"pitch is {pitch} and must be at least width, {width}.")
    if tokens % (bag or 1):
        raise ValueError(f"tokens is {tokens} and must be a multiple of bag, {bag}.")
    has_bags = bag is not None or bags is not None
    if sum(each is not None for each in (multiplier, bag, bags, ngram_size)) > 1 or (per_sample_weights and not has_bags):
        raise ValueError("multiplier, bag, bags and ngram_size exclude one another, and per_sample_weights goes with bags.")
    if mode is not None and not has_bags and ngram_size is None:
        raise ValueError(f"mode is {mode!r} and must be left out where neither bags nor ngram_size are given.")
    if mode is None:
        mode = "mean" if ngram_size is None else "concat"
    if ngram_size is not None and (padding_idx is not None or scale_grad_by_freq):
        raise ValueError("padding_idx and scale_grad_by_freq do not go with ngram_size.")
    if rms_norm_eps is not None and (has_bags or ngram_size is not None):
        raise ValueError("rms_norm_eps goes with neither bags nor ngram_size.")
    shape = (tokens,) if bag is None else (tokens // bag, bag)
    indices = torch.empty(shape, dtype=torch.int64, device="meta")
    starts = None if bags is None else torch.empty(bags, dtype=torch.int64, device="meta")
    table = leaf(vocabulary, pitch or width, dtype=dtype, gradient=False)[:, :width].requires_grad_(backward)
    sample = leaf(*shape, dtype=dtype, gradient=backward) if per_sample_weights else None
    gradient = {"padding_idx": padding_idx, "scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse}

    def look_up() -> Tensor:
        if has_bags:
            return embedding_bag(indices, table, starts, mode=mode, per_sample_weights=sample, **gradient)  # type: ignore[arg-type]
        if ngram_size is None:
            return embedding(indices, table, multiplier=multiplier, rms_norm_eps=rms_norm_eps, **gradient)  # type: ignore[arg-type]
        factors, sizes, offsets = (torch.empty(n, dtype=torch.int64, device="meta") for n in (ngram_size, heads, heads))
        return ngram_embedding(indices, table, factors, sizes, offsets, 0, ngram_size, mode=mode, sparse=sparse)

    def run() -> Mapping[str, int]:
        out = look_up()
        read = tokens * (1 if ngram_size is None else heads) * width * table.itemsize  # rows of the table
        moved = {"forward": nbytes((indices, starts, sample, out)) + read}
        if backward:
            dweight, *dsample = gradients((out,), (table, sample))
            moved["backward"] = nbytes((indices, starts, sample, out, dweight._values() if sparse else dweight, *dsample))
            moved["backward"] += read if per_sample_weights else 0
        return moved

    what = f"{tokens} rows" if ngram_size is None else f"{heads} rows ({mode}) for each of {tokens} tokens"
    what = what if bag is None else f"{tokens // bag} bags ({mode}) of {bag} rows"
    what = what if bags is None else f"{bags} bags ({mode}) of {tokens} rows in all"
    call = f"Look-up of {what}, of {vocabulary} x {width} in {dtype},"
    return explain_run(call, run, chosen_chip(chip), names=NAMES)
