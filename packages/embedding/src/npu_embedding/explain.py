"""What a look-up launches on a chip, and why, with neither tensors' data nor a device: `python -m npu_embedding explain`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from npu_tiling import Device
from npu_tiling.explaining.explanation import Explanation
from npu_tiling.explaining.explanation import explain as explain_run
from npu_tiling.explaining.inputs import Dtype, chosen_chip, gradients, leaf, nbytes
from torch import Tensor

from .api import embedding
from .ngram import ngram_embedding


def explain(
    *,
    tokens: int,
    vocabulary: int,
    width: int,
    dtype: Dtype = "bf16",
    chip: str | Device | None = None,
    backward: bool = False,
    pitch: int | None = None,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
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
        scale_grad_by_freq: the gradient of a row is divided by how many indices name it.
        sparse: the gradient has an entry for each index.
        ngram_size: of an n-gram look-up; None: indices are given.
        heads: of all n-grams; a row is one head's.

    Returns:
        An Explanation; `text` is for people.

    Raises:
        UnknownDeviceError: the chip is not known, or none is named where there is none.
        ValueError: no call has these options.
    """
    indices = torch.empty(tokens, dtype=torch.int64, device="meta")
    table = leaf(vocabulary, pitch or width, dtype=dtype, gradient=False)[:, :width].requires_grad_(backward)

    def look_up() -> Tensor:
        if ngram_size is None:
            return embedding(indices, table, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)
        factors, sizes, offsets = (torch.empty(n, dtype=torch.int64, device="meta") for n in (ngram_size, heads, heads))
        return ngram_embedding(indices, table, factors, sizes, offsets, 0, ngram_size, sparse=sparse)

    def run() -> Mapping[str, int]:
        out = look_up()
        moved = {"forward": nbytes((indices, out, out))}  # a row of the table for each row of the output
        if backward:
            (dweight,) = gradients((out,), (table,))
            moved["backward"] = nbytes((indices, out, dweight._values() if sparse else dweight))
        return moved

    what = f"{tokens} rows" if ngram_size is None else f"{heads} rows for each of {tokens} tokens"
    call = f"Look-up of {what}, of {vocabulary} x {width} in {dtype},"
    return explain_run(call, run, chosen_chip(chip))
