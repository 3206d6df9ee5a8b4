"""The kernels of CUDA in Triton's interpreter, against the definition in PyTorch: see test_cuda_interpreted.py."""

import sys
from collections.abc import Callable

import npu_tiling
import torch
import triton.language as tl
from npu_rms_norm import (
    add_rms_norm,
    add_rms_norm_dynamic_quant,
    formula,
    gated_rms_norm,
    qk_rms_norm,
    rms_norm,
    rms_norm_dynamic_quant,
)
from npu_tiling import Kernels
from npu_tiling import device as rounding
from torch import Tensor

from testing.interpreter import mend

H200 = npu_tiling.Device("H200", "cuda", "sm_90", 3, 3, 232448, max_grid=2**31 - 1)
BF16, FP32 = torch.bfloat16, torch.float32
FUNCTIONS = {"plain": rms_norm, "add": add_rms_norm, "gated": gated_rms_norm}
launched: set[str] = set()


def mend_interpreter() -> None:
    """It has no inline assembly, and casts of Ascend alone where triton-ascend is installed."""
    mend()

    def without_assembly(self, module, kernel, decision, grid, tensors, scalars):
        constants = decision.constants
        chunks = "chunks" if "M" in constants and constants["N"] > constants["BLOCK_N"] else ""
        launched.add(f"{kernel} {constants.get('ORDER', '')} {chunks}".strip())
        self._import(module, kernel)[(grid,)](*tensors, *scalars, **constants)

    Kernels.launch = without_assembly
    rounding.ASCEND, formula.ASCEND = tl.constexpr(True), tl.constexpr(False)


def case(
    shape, dtype=FP32, *, kind="plain", parameter=None, bias=False, slices=0, **options
) -> Callable[[], tuple[Tensor, ...]]:
    """A forward and a backward. `slices`: x is one of so many slices of a wider tensor."""

    def call() -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        x = torch.randn(shape[0], max(1, slices), *shape[1:]).to(dtype)
        x = (x[:, slices // 2] if slices else x.view(shape)).requires_grad_()
        other = torch.randn(shape).to(dtype).requires_grad_()
        weight, added = (torch.randn(parameter or shape[-1:]).to(dtype).requires_grad_() for _ in range(2))
        inputs = [x, other, weight] if kind in ("add", "gated") else [x, weight]
        results = FUNCTIONS[kind](*inputs, bias=added if bias else None, **options)
        results = (results,) if isinstance(results, Tensor) else tuple(results)
        upstream = [torch.randn(each.shape).to(each.dtype) for each in results]
        return (*results, *torch.autograd.grad(results, inputs + [added] * bias, upstream))

    return call


def quantised(shape, *, residual=False) -> Callable[[], tuple[Tensor, ...]]:
    """Rows with NaN and with inf among others."""

    def call() -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        x, other = torch.randn(2, *shape)
        x[0, 3], x[-1, 5] = float("nan"), float("inf")
        weight = torch.rand(shape[-1]) + 0.5
        if residual:
            y, total, scale = add_rms_norm_dynamic_quant(x, other, weight)
            return y.float() * scale[:, None], total, scale
        y, scale = rms_norm_dynamic_quant(x, weight)
        return y.float() * scale[:, None], scale

    return call


def projection() -> tuple[Tensor, ...]:
    """q and k of a fused projection: their gradients are slices of one tensor."""
    torch.manual_seed(0)
    leaves = [torch.randn(shape).requires_grad_() for shape in ((9, 8 * 64), (64,), (64,))]
    results = tuple(qk_rms_norm(*leaves, 4, 2))
    return (*results, *torch.autograd.grad(results, leaves, [torch.randn(each.shape) for each in results]))


CASES = {
    "rows": case((37, 100)),
    "rows, bf16, none": case((37, 128), BF16, casting_mode="none", offset=1.0),
    "chunks": case((7, 2560)),
    "forward by columns": case((5, 7000), kind="add"),
    "columns, bias": case((4, 17000), bias=True),
    "columns, gated": case((4, 17000), kind="gated"),
    "groups": case((9, 4, 64), slices=3),
    "q and k": projection,
    "groups, chunks": case((3, 2, 1280), slices=3),
    "groups longer than a kernel is compiled for": case((2, 1030, 16), slices=3),
    "tokens and heads": case((9, 3, 64), parameter=(3, 64), bias=True),
    "heads, gated": case((9, 3, 64), parameter=(3, 64), kind="gated", bias=True),
    "heads by columns": case((2, 2, 17000), parameter=(2, 17000)),
    "gated rows": case((37, 128), kind="gated", bias=True),
    "gated first, chunks": case((7, 1280), kind="gated", norm_before_gate=False, activation="sigmoid"),
    "add, in fp32 too": case((37, 512), BF16, kind="add", return_fp32=True),
    "in place": case((37, 512), in_place=True),
    "int8, rows": quantised((37, 128)),
    "int8, chunks": quantised((7, 2560), residual=True),
    "int8, columns": quantised((3, 17000)),
}
KERNELS = {
    "forward_kernel one",
    "forward_kernel one chunks",
    "forward_kernel groups",
    "forward_kernel groups chunks",
    "forward_kernel tokens",
    "backward_kernel one",
    "backward_kernel one chunks",
    "backward_kernel groups",
    "backward_kernel groups chunks",
    "backward_kernel heads",
    "qk_backward_kernel groups",
    "forward_wide_kernel one",
    "forward_wide_kernel heads",
    "backward_wide_mean_kernel one",
    "backward_wide_mean_kernel heads",
    "backward_wide_kernel one",
    "backward_wide_kernel heads",
    "sum_partials_kernel",
}


def main() -> None:
    mend_interpreter()
    for name, call in CASES.items():
        expected = call()
        with npu_tiling.use_device(H200, emulated=True):
            found = call()
        # The interpreter cuts fp32 to bf16, and does not round.
        allowed = 0.02 if found[0].dtype == BF16 else 1e-2 if "int8" in name else 1e-5
        for actual, wanted in zip(found, expected, strict=True):
            assert torch.equal(actual.isnan(), wanted.isnan()), name
            error = (actual.float() - wanted.float()).nan_to_num(0.0).abs().max()
            assert error <= allowed * wanted.float().nan_to_num(0.0).abs().max(), (name, float(error))
        print(f"right: {name}", flush=True)
    assert launched == KERNELS, launched ^ KERNELS


if __name__ == "__main__":
    sys.exit(main())
