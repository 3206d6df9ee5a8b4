"""What the functions return: tuples with names."""

from __future__ import annotations

from typing import NamedTuple

from npu_tiling.pytorch.exporting import exported
from torch import Tensor


@exported
class WithFP32(NamedTuple):
    """What `rms_norm` and `gated_rms_norm` return with return_fp32.

    Attributes:
        y: the result.
        fp32: the same in fp32.
    """

    y: Tensor
    fp32: Tensor


@exported
class AddedRMSNorm(NamedTuple):
    """What `add_rms_norm` returns.

    Attributes:
        y: the normalised sum.
        residual: the sum, in the residual's dtype.
    """

    y: Tensor
    residual: Tensor


@exported
class AddedWithFP32(NamedTuple):
    """What `add_rms_norm` returns with return_fp32.

    Attributes:
        y: the normalised sum.
        residual: the sum, in the residual's dtype.
        fp32: y in fp32.
    """

    y: Tensor
    residual: Tensor
    fp32: Tensor


@exported
class DynamicQuant(NamedTuple):
    """What `rms_norm_dynamic_quant` returns.

    Attributes:
        y: the result in steps of its row's scale.
        scale: of each row.
    """

    y: Tensor
    scale: Tensor


@exported
class AddedDynamicQuant(NamedTuple):
    """What `add_rms_norm_dynamic_quant` returns.

    Attributes:
        y: the normalised sum in steps of its row's scale.
        residual: the sum, in the residual's dtype.
        scale: of each row.
    """

    y: Tensor
    residual: Tensor
    scale: Tensor


@exported
class QKV(NamedTuple):
    """What `qk_rms_norm` returns.

    Attributes:
        q: normalised queries.
        k: normalised keys.
        v: values, a view of the projection.
    """

    q: Tensor
    k: Tensor
    v: Tensor
