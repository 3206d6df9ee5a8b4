"""What the operators share: their library, parts of schemas, and functions on results."""

from __future__ import annotations

from collections.abc import Sequence

from npu_tiling import device_for
from npu_tiling.pytorch.autograd import OperatorLibrary
from npu_tiling.pytorch.tensors import allocate_like
from torch import Tensor

from .. import reference
from ..launch import two_phase
from ..reference import Statistics, Weights

OPERATORS = OperatorLibrary("npu_attn_res")
WEIGHTS = "Tensor query, Tensor rms_weight, Tensor? output_rms_weight"
STATISTICS = "Tensor score, Tensor rstd, Tensor lse, Tensor norm_rstd"
SAVED = "Tensor score, Tensor rstd, Tensor lse, Tensor? norm_rstd"


def gradient_of_h(
    dh: Tensor | None, dy: Tensor | None, h: Tensor | None, weights: Weights, statistics: Statistics, need_dweight: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradient of h with what reaches it through y, and that of the RMSNorm's weight."""
    if dy is None:
        assert dh is not None
        return dh, None
    weight, rstd = weights.output, statistics.norm_rstd
    assert h is not None and weight is not None and rstd is not None
    device = device_for(dy.device)
    if device is None:
        return reference.normalise_backward(dy, dh, h, weight, rstd.view(h.shape[:-1]))
    return two_phase.normalise_backward(dy, dh, h, weight, rstd, need_dweight, device)


def allocate_gradients(tensors: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor | None]:
    """Memory for the gradients of those that need one, contiguous: of each its own, to be free when that one is."""
    return [allocate_like(one) if need else None for one, need in zip(tensors, needed, strict=True)]


def contiguous(result: Tensor | None) -> Tensor | None:
    """A result with the strides that the fake functions promise: PyTorch's follow those of the inputs."""
    return None if result is None else result.contiguous()


def fake_gradients(tensors: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor | None]:
    """As `allocate_gradients`, of tensors without data."""
    return [one.new_empty(one.shape) if need else None for one, need in zip(tensors, needed, strict=True)]
