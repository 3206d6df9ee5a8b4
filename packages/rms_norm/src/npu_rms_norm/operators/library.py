"""The package's operators in PyTorch, and what several of them return."""

from __future__ import annotations

import torch
from npu_tiling.pytorch.autograd import OperatorLibrary
from npu_tiling.pytorch.tensors import statistics_dtype
from torch import Tensor

from ..launch.rstd import allocate_rstd, has_heads

OPERATORS = OperatorLibrary("npu_rms_norm")


def outputs(wide: Tensor, dtype: torch.dtype, return_fp32: bool) -> tuple[Tensor, Tensor | None]:
    """y and, where it is asked for, y as it is; two tensors, even of one dtype."""
    return wide.to(dtype).contiguous(), wide.clone(memory_format=torch.contiguous_format) if return_fp32 else None


def fake_fp32(x: Tensor, dtype: torch.dtype, wanted: bool) -> Tensor | None:
    """The shape of y in fp32."""
    return torch.empty(x.shape, dtype=statistics_dtype(dtype), device=x.device) if wanted else None


def fake_rstd(x: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype, save_rstd: bool) -> Tensor | None:
    """The shape and the strides of rstd."""
    return allocate_rstd(x, has_heads(weight, bias), statistics_dtype(dtype)) if save_rstd else None


def fake_parameters(
    weight: Tensor | None, bias: Tensor | None, need_dweight: bool, need_dbias: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The shapes of the parameters' gradients."""
    dweight, dbias = (
        torch.empty(one.shape, dtype=one.dtype, device=one.device) if needed and one is not None else None
        for one, needed in ((weight, need_dweight), (bias, need_dbias))
    )
    return dweight, dbias
