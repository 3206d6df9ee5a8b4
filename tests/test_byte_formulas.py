"""Kernels move what the operators' benchmarks declare, to within 5 %, on an emulated chip: forward and backward.

The formula of an operator is its benchmark's `traffic`, which counts what must cross between memory and the chip. A launch
moves two things beside it, stated here: what every core reads or writes for itself, and what is read again from the cache.
"""

from __future__ import annotations

from pathlib import Path

import npu_offline
import npu_tiling
import pytest
import torch
from npu_bench import Case
from npu_bench.modes import as_tuple, differentiated
from npu_bench.runner import make_inputs
from npu_bench.scripts import load

ROOT = Path(__file__).parents[1]
SOC = "Ascend910B4"
CORES = npu_tiling.soc(SOC).vector_cores
CPU = torch.device("cpu")
BF16, FP32 = 2, 4
pytestmark = [
    pytest.mark.compilers,
    pytest.mark.skipif(not npu_offline.installed(), reason="needs triton-ascend and a toolchain (npu-offline fetch)"),
]

CASES = {
    "rms_norm": {"shape": (3000, 1024), "storage": (3000, 1024)},
    "embedding": {"n": 2000, "rows": 3000, "width": 768, "dtype": torch.float32, "kind": "zipf"},
    "attn_res": {"tokens": 300, "blocks": 8, "width": 2048, "listed": False},
    "fused_linear_cross_entropy": {"tokens": 80, "width": 16, "vocabulary": 32000},
}


def for_each_core(operator, case, mode):
    """Bytes that all cores read and write for themselves: parameters, and a partial sum that another launch adds."""
    if operator == "rms_norm":
        return CORES * case["shape"][-1] * (BF16 + (2 * FP32 if mode == "backward" else 0))
    if operator == "attn_res":
        return CORES * case["width"] * 2 * (BF16 + (2 * FP32 if mode == "backward" else 0))
    if operator == "fused_linear_cross_entropy" and mode == "backward":
        return CORES * 2 * FP32  # the loss's own gradient, for each of two gradients
    return 0


def read_again(operator, case, mode):
    """Bytes that pass through the core a second time, and come from the cache."""
    if operator == "attn_res" and mode == "backward":
        # Rounding the output to bf16 makes the first sweep's sum inexact; an exact gradient takes a second one.
        return case["blocks"] * case["tokens"] * case["width"] * BF16
    return 0


@pytest.fixture(scope="module", params=CASES)
def measured(request):
    """An operator, its case, the formula's bytes and the launches of each mode."""
    operator = request.param
    benchmark = load(ROOT / "packages" / operator / "benchmarks" / f"{operator}.py")
    case = Case("emulated", CASES[operator], None)
    inputs = make_inputs(benchmark, case, CPU)
    with npu_offline.emulate(SOC, races=True, ledgers=True) as emulation:
        outputs = as_tuple(benchmark.providers[benchmark.ours](case, CPU)(*inputs.values()))
        forward = list(emulation.launches)
        seeds = [torch.ones_like(output) for output in outputs]
        torch.autograd.grad(outputs, tuple(differentiated(inputs).values()), seeds)
        backward = emulation.launches[len(forward) :]
    formula = {mode: benchmark.bytes_moved(case, mode) for mode in ("forward", "backward")}
    return operator, case, formula, {"forward": forward, "backward": backward}


@pytest.mark.few(4)
@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_kernels_move_what_the_operator_declares(measured, mode):
    operator, case, formula, launches = measured
    moved = sum(traffic.read + traffic.written for launch in launches[mode] for traffic in launch.arguments.values())
    declared = formula[mode] + read_again(operator, case, mode)
    assert 0.95 * declared <= moved <= 1.05 * declared + for_each_core(operator, case, mode)


def test_what_is_written_is_written_once(measured):
    for launch in (launch for launches in measured[-1].values() for launch in launches):
        for name, traffic in launch.arguments.items():
            assert traffic.written == launch.ledgers[name].useful_written, f"{launch.kernel}: {name}"
            assert traffic.atomics == 0
