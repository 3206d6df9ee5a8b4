"""The plan of the forward: one launch. It holds rows on chip or, where they are too wide, reads blocks of columns."""

from __future__ import annotations

from typing import Any

from npu_tiling.plans import Plan, Slot

from .ascend import kernels as ascend
from .call import Forward
from .cuda import kernels as cuda
from .layout import rows_of, smaller
from .wide import forward_wide_kernel

NAME = "rms_norm forward"


def forward(p: Plan, call: Forward) -> tuple[Slot | None, ...]:
    """y, the sum, y in fp32, rstd and the scales of a quantised y; None for what is not asked for."""
    wanted = call.results()
    if wanted["scale"] is not None:  # kernels store scales head by head; a contiguous copy is the result
        wanted["scale"] = wanted["scale"]._replace(last_outermost=call.has_heads())
    results = {name: p.new(each) for name, each in wanted.items()}
    if not call.x.numel():
        return tuple(results.values())
    tensors: dict[str, Any] = {"x": call.x, "residual": call.residual, "gate": call.gate}
    rows = rows_of(call, tensors, results["y"], p.chip)
    if rows.copied:
        tensors = {name: p.contiguous(each) for name, each in tensors.items()}
    weight, bias = p.contiguous(call.weight), p.contiguous(call.bias)
    tiling = p.choose(NAME, rows.tiling, smaller)
    of_chip = cuda if p.chip.kind == "cuda" else ascend
    p.launch(
        forward_wide_kernel if tiling.kernel == "wide" else of_chip.forward_kernel,
        NAME,
        tiling.grid,
        reads={f"p_{name}": each for name, each in tensors.items()} | {"p_weight": weight, "p_bias": bias},
        writes={f"p_{name}": each for name, each in results.items()},
        sizes=rows.sizes("x", "residual", "gate", eps=call.eps),
    )
    y, total, fp32, rstd, scale = results.values()
    return y, total, fp32, rstd, p.contiguous(scale)
