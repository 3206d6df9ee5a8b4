"""What the Ascend compilers make of the kernels, and how many bytes they move: no chip, and no time, involved."""

import dataclasses
import re
from functools import partial

import losses
import npu_offline
import npu_tiling
import pytest
import torch
from npu_fused_linear_cross_entropy import fused_linear_cross_entropy, matmul
from npu_fused_linear_cross_entropy.tiling import AscendTiling, ChunkKernel, ChunkShape
from npu_offline.check.execution import WEAK
from planned_anew import planned_anew

from testing.ascend import *  # noqa: F403
from testing.ascend import Batches, Computed, launches, moved, pytestmark, required

launches_of = partial(launches, __file__)
pytestmark = [*pytestmark, pytest.mark.few(3)]
TILES = ("bfloat16 123", "bfloat16 128256", "bfloat16 50257, everything", "float32 32000", "bfloat16 50257, distributions")


def may_lose_a_buffer(record, soc, toolchain):
    """CANN 9.0 gives loops that store the targets' elements row by row one buffer on an Ascend950."""
    stores_targets = "exponentials" in record.name or "settle" in record.name
    return toolchain == "1.1.0" and soc.startswith("Ascend950") and stores_targets


def check_report(record, report):
    """The scalar unit touches values of single rows, never an element of a tile."""
    if record.name in PASSES:
        rows = record.constants["BLOCK_M"]
        loads = re.findall(r"memref\.load .* : memref<(\d+)(?:x(\d+))?x[a-z]", report.stages["final"])
        assert all(int(n) * int(m or 1) <= 2 * rows for n, m in loads)


def of_tokens(tokens):
    x, weight = torch.zeros(tokens, 16, requires_grad=True), torch.zeros(123, 16, requires_grad=True)
    fused_linear_cross_entropy(x, weight, torch.zeros(tokens, dtype=torch.int64)).backward()


def computed(name, *sizes, roundings=1, **options):
    case, results = losses.make(*sizes, **options), []

    def run():
        results[:] = [losses.run(case, "cpu")]
        return results[0].outputs["loss"], *results[0].gradients.values()

    return Computed(name, run, lambda _: losses.check(case, results[0], roundings=roundings), tensors=6)


INDEPENDENT = (Batches("tokens", of_tokens, ((2,), (3,), (64,), (1000,)), 4),)
ON_OTHER_CHIPS = (computed("5000", 37, 16, 5000, label_smoothing=0.1, return_token_accuracy=True),)
IN_ANY_ORDER = (computed("5000", 150, 16, 5000),)
GUARDED = tuple(
    computed(f"{vocabulary}", 37, 16, vocabulary, roundings=4, reduction=reduction, chunk_tokens=10)
    for vocabulary, reduction in ((7, "mean"), (123, "none"), (5001, "mean"))
)

PASSES = ("cross_entropy_kernel", "cross_entropy_exponentials_kernel", "cross_entropy_statistics_kernel")  # over whole rows
PASSES += ("distribution_statistics_kernel", "distribution_gradient_kernel")
PROBLEMS = {
    "plain": ("bfloat16 128256", {"kernel": ChunkKernel.EXPONENTIALS}),
    "narrow logits": ("bfloat16 128256, narrow logits", {"itemsize": 2, "kernel": ChunkKernel.EXPONENTIALS}),
    "loss alone": ("bfloat16 128256, loss alone", {"kernel": ChunkKernel.STATISTICS, "written_itemsize": 0}),
    "smoothing": ("bfloat16 128256, smoothing", {"smoothed": True}),
    "accuracy": ("bfloat16 128256, accuracy", {"argmax": True}),
    "whole rows": ("bfloat16 1000", {}),
}


@pytest.mark.parametrize("what", PROBLEMS)
def test_declared_tiles_are_what_the_compiler_needs(what):
    """Never less, or a chosen tile would not compile; not much more, or transfers would be short for nothing."""
    label, changes = PROBLEMS[what]
    record = next(record for record in launches_of(label) if record.name in PASSES)
    chip = npu_tiling.soc("Ascend910B4")
    whole = what == "whole rows"
    width, rows, block, tail = (8000, 4, 8016, 8000) if whole else (128256, 2, 8016, 0)
    shape = ChunkShape(**{"kernel": ChunkKernel.BOTH, "width": width, "itemsize": 4, "written_itemsize": 2, **changes})
    exponentials = shape.kernel is ChunkKernel.EXPONENTIALS
    toolchains = ["1.0.0", "1.1.0"]
    if exponentials:
        block, toolchains = 16032, ["1.0.0"]  # a later one would give loads one buffer each, and say that it fits
    declared = AscendTiling(shape=shape, device=chip, block_m=rows, block_n=block, tail_n=tail).ub_bytes
    constants = {**record.constants, "N": width, "BLOCK_M": rows, "BLOCK_N": block, "TAIL_N": tail}
    if exponentials:
        constants["TILES"] = width // block
    for toolchain in toolchains:
        needed = required(record, constants, toolchain)
        assert needed <= declared <= 1.2 * needed


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("vocabulary", "options", "reads"),
    [
        (1000, {}, 1),
        (32000, {}, 1),
        (50257, {}, 1),
        (50257, {"lse_square_scale": 0.1, "token_scaling": True}, 1),
        (32000, {"return_token_accuracy": True}, 2),
        (50257, {"softcap": 30.0}, 2),
    ],
)
@pytest.mark.parametrize(("dtype", "narrow"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)])
def test_memory_traffic_is_the_minimum(vocabulary, options, reads, dtype, narrow, monkeypatch):
    """The logits are read once (twice, where an option takes a second sweep), and the gradient is written once."""
    if narrow:
        monkeypatch.setattr(matmul, "writes_fp32", lambda *_: False)
    tokens = 80
    case = losses.make(tokens, 16, vocabulary, dtype, **options)
    with planned_anew(), npu_offline.emulate("Ascend910B4") as emulation:
        losses.run(case, "cpu")
    (moving,) = [launch for launch in emulation.launches if launch.kernel in PASSES]
    logits = tokens * vocabulary * (dtype.itemsize if narrow else 4)
    minimum = reads * logits + tokens * vocabulary * dtype.itemsize
    assert minimum <= moved(moving) <= 1.05 * minimum
    for name, traffic in moving.arguments.items():
        assert traffic.atomics == 0
        assert traffic.scalars <= 8 * tokens, name
    if vocabulary > 1000:
        read = moving.arguments["p_logits"]
        assert read.read / (read.transfers or 1) >= (5.5 if narrow else 8) * 1024


def test_the_loss_alone_reads_the_logits_once():
    case = losses.make(80, 16, 32000)
    with npu_offline.emulate("Ascend910B4") as emulation:
        fused_linear_cross_entropy(case.x, case.weight, case.target)
    (moving,) = [launch for launch in emulation.launches if launch.kernel == "cross_entropy_statistics_kernel"]
    assert 80 * 32000 * 4 <= moved(moving) <= 1.05 * 80 * 32000 * 4


def test_a_gradient_of_one_is_not_multiplied():
    """Where the loss's own gradient is 1, scaling reads that number and nothing else."""
    for factor in (1.0, 2.0):
        case = losses.make(80, 16, 1000)
        x, weight = losses.leaf(case.x, "cpu"), losses.leaf(case.weight, "cpu")
        with npu_offline.emulate("Ascend910B4") as emulation:
            loss = fused_linear_cross_entropy(x, weight, case.target)
            loss.backward(torch.tensor(factor))
        scaling = [launch for launch in emulation.launches if launch.kernel == "cross_entropy_scale_kernel"]
        assert len(scaling) == 2
        moved = sum(launch.arguments["p_values"].read + launch.arguments["p_values"].written for launch in scaling)
        assert moved == (0 if factor == 1.0 else 2 * (x.numel() + weight.numel()) * 2)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_gradients_of_a_graph_that_is_kept_are_read_once_and_written_elsewhere(factor):
    case = losses.make(80, 16, 1000)
    x, weight = losses.leaf(case.x, "cpu"), losses.leaf(case.weight, "cpu")
    with npu_offline.emulate("Ascend910B4") as emulation:
        loss = fused_linear_cross_entropy(x, weight, case.target)
        upstream = torch.tensor(factor)
        first, second = (torch.autograd.grad(loss, (x, weight), upstream, retain_graph=True) for _ in range(2))
        last = torch.autograd.grad(loss, (x, weight))  # in the memory that the forward wrote
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert all(torch.equal(one, factor * other) for one, other in zip(first, last, strict=True))
    scaling = [launch for launch in emulation.launches if launch.kernel == "cross_entropy_scale_kernel"]
    assert len(scaling) == 6
    size = 2 * (x.numel() + weight.numel())
    moved = [(launch.arguments["p_values"].read, launch.arguments["p_out"].written) for launch in scaling[:4]]
    assert [*map(sum, zip(*moved, strict=True))] == [2 * size, 2 * size]


KEPT = {"memory_budget": 7 * 4 * 2048}


@pytest.mark.few(1)
@pytest.mark.parametrize(("options", "toolchain"), [*(({}, one) for one in npu_offline.VERSIONS), (KEPT, "1.0.0")])
def test_final_modules_of_rows_that_rise(options, toolchain):
    """What was written before a reference was raised is read and written again: no hazard, and fp64's result."""
    case = losses.make(7, 16, 9001, **options)
    x, weight = case.x.clone(), case.weight.clone()
    x[:, 0] = torch.arange(7) % 2
    weight[:, 0] = torch.linspace(100, -100, 9001)
    case = dataclasses.replace(case, x=x, weight=weight)
    with npu_offline.emulate("Ascend910B4", toolchain=toolchain, checks=True) as emulation:
        losses.check(case, losses.run(case, "cpu"))
    assert any("exponentials" in launch.kernel or "settle" in launch.kernel for launch in emulation.launches)
    assert not [note for launch in emulation.launches for note in launch.notes if note.kind != WEAK]
