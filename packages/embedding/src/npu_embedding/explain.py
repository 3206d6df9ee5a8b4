"""What a look-up launches on a chip, and why, with neither tensors' data nor a device: `python -m npu_embedding explain`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from npu_tiling import Device
from npu_tiling.explaining.explanation import Explanation
from npu_tiling.explaining.explanation import explain as explain_run
from npu_tiling.explaining.inputs import Dtype, chosen_chip, gradients, leaf, nbytes

from .api import embedding


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

    Returns:
        An Explanation; `text` is for people.

    Raises:
        UnknownDeviceError: the chip is not known, or none is named where there is none.
        ValueError: no call has these options.
    """
    indices = torch.empty(tokens, dtype=torch.int64, device="meta")
    table = leaf(vocabulary, pitch or width, dtype=dtype, gradient=False)[:, :width].requires_grad_(backward)

    def run() -> Mapping[str, int]:
        out = embedding(indices, table, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)
        moved = {"forward": nbytes((indices, out, out))}  # a row of the table for each row of the output
        if backward:
            (dweight,) = gradients((out,), (table,))
            moved["backward"] = nbytes((indices, out, dweight._values() if sparse else dweight))
        return moved

    call = f"Look-up of {tokens} rows, of {vocabulary} x {width} in {dtype},"
    return explain_run(call, run, chosen_chip(chip))
