"""The arguments of the operators, in their order: records that registration, definition and launches share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Forward(NamedTuple):
    """The arguments of `rms_norm`.

    Attributes:
        x: [..., D].
        residual: is added to x; None: nothing is.
        gate: of x or of the result; None: there is no gate.
        weight, bias: [D] or [H, D].
        eps, offset, casting_mode, activation, norm_before_gate, in_place: as the public functions have them.
        dtype: of y; of one byte: y is quantised.
        return_fp32: y in fp32 too.
        save_rstd: whether a backward will follow.
    """

    x: Tensor
    residual: Tensor | None
    gate: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    offset: float
    casting_mode: str
    activation: str
    norm_before_gate: bool
    in_place: bool
    dtype: torch.dtype
    return_fp32: bool
    save_rstd: bool


class Backward(NamedTuple):
    """The arguments of `rms_norm_backward`.

    Attributes:
        dy: the gradient of y.
        dsum: a gradient that reaches x from elsewhere; None: there is none.
        x: what was normalised or gated: with a residual, the sum.
        gate, weight, bias, offset, casting_mode, activation, norm_before_gate: the forward's.
        rstd: [...], from the forward.
        rounded_to: the dtype that the casting mode rounds to.
        need_dx, need_dgate, need_dweight, need_dbias: the gradients that are asked for.
    """

    dy: Tensor
    dsum: Tensor | None
    x: Tensor
    gate: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    rstd: Tensor
    offset: float
    casting_mode: str
    activation: str
    norm_before_gate: bool
    rounded_to: torch.dtype
    need_dx: bool
    need_dgate: bool
    need_dweight: bool
    need_dbias: bool
