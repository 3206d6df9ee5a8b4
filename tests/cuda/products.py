"""Products of 16-bit matrices without cuBLAS's kernels of TMA and wgmma.

racecheck of compute-sanitizer 2025.3.1 ends with "failed to handle a hardware exception" at those kernels
(`nvjet_sm90_...`): a program that only calls `torch.mm` on bf16 matrices of 64 x 64 and 64 x 1000 shows it, whichever
kernels are watched. cuBLAS has other kernels for fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from inside import InsideOperators
from torch import Tensor

_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm)


class ProductsInFp32(InsideOperators):
    """Products of operands that are cast to fp32, rounded to the dtype of their result."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.overloadpacket not in _PRODUCTS or args[0].dtype == torch.float64:
            return func(*args, **kwargs)
        factors = {name: value for name, value in kwargs.items() if name in ("alpha", "beta")}
        # `mm` and `addmm` with a dtype of the result have it among their arguments.
        result = func.overloadpacket(*(value.float() for value in args if isinstance(value, Tensor)), **factors)
        if "out" in kwargs:
            return kwargs["out"].copy_(result)
        dtypes = [value for value in args if isinstance(value, torch.dtype)]
        return result.to(*dtypes or [args[0].dtype])
