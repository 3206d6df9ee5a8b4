"""The backward on Ascend of one row a tile, which keeps <dh, v_i> of its blocks, and statistics [tokens, sources] for it."""

from types import SimpleNamespace

import banks
import depth
import npu_offline
import npu_tiling
import pytest
import torch
from npu_attn_res import attn_res, attn_res_bank, shape
from npu_attn_res.ascend.tiling import statistics_by_token
from npu_offline.timing import costs_of, time_launch

REASON = "needs triton-ascend (npu-offline fetch)"
pytestmark = [pytest.mark.compilers, pytest.mark.skipif(not npu_offline.installed(), reason=REASON)]
compilers = pytest.mark.skipif(len(npu_offline.installed()) < 3, reason="needs the three toolchains (npu-offline fetch)")
CHIP = "Ascend910B4"
KERNEL, OTHER = "attn_res_backward_row_kernel", "attn_res_backward_kernel"
PLACE = SimpleNamespace(name="emulated", torch=torch.device("cpu"))
WHOLE, HALVES = 4096, 7168
OPS = torch.ops.npu_attn_res


@pytest.fixture
def chip(monkeypatch):
    """So few programs that each one has several tiles."""
    monkeypatch.setattr(shape, "persistent_grid", lambda tiles, device, *, per_core: min(tiles, 2))
    with npu_offline.emulate(CHIP) as emulation:
        yield emulation


def kernels(function):
    """The names of the launches that a call makes."""
    with npu_offline.record(CHIP) as records:
        function()
    return [record.name for record in records]


@pytest.mark.few(3)
@pytest.mark.parametrize("width", [2048, 2049, 4255, 4300, 7001])
@pytest.mark.parametrize("listed", [False, True], ids=["stacked", "list"])
def test_rows_of_any_width_give_the_gradients_of_the_formula(chip, width, listed):
    case = depth.make(3, 5, width, torch.bfloat16, sharp=2.0)
    assert KERNEL in kernels(lambda: depth.run(case, "cpu", listed))
    depth.check(case, depth.run(case, "cpu", listed))


@pytest.mark.parametrize("n_blocks", [64, 65])
def test_more_sources_than_are_kept_take_the_other_kernel(chip, n_blocks):
    case = depth.make(n_blocks, 3, 2048, torch.bfloat16)
    assert (KERNEL if n_blocks <= 64 else OTHER) in kernels(lambda: depth.run(case, "cpu"))
    depth.check(case, depth.run(case, "cpu"))


@pytest.mark.parametrize("width", [WHOLE, HALVES])
def test_blocks_without_a_gradient_are_left_out(chip, width):
    case = depth.make(3, 5, width, torch.bfloat16)
    _, expected, *_ = depth.exact(case)
    blocks = [case.blocks[0].clone(), depth.leaf(case.blocks[1], "cpu"), case.blocks[2].clone()]
    h = attn_res(blocks, case.query, case.rms_weight, rms_eps=case.eps)
    (found,) = torch.autograd.grad(h, blocks[1:2], case.dh)
    depth.near(found, expected[1], fp32=5e-4)


@pytest.mark.few(2)
@pytest.mark.parametrize("width", [2048, WHOLE, HALVES])
@pytest.mark.parametrize("n_blocks", [0, 2])
@pytest.mark.parametrize("counted", [False, True], ids=["int", "on the device"])
def test_a_bank_gives_the_gradients_of_the_formula(chip, width, n_blocks, counted):
    """What of a token's statistics lies between its blocks and its prefix was never written."""
    given = banks.tensors(PLACE, 5, 4, n_blocks, width)

    def call():
        memory, prefix, *weights = [one.detach().requires_grad_() for one in (*given[:2], *given[3:])]
        h = attn_res_bank(memory, torch.tensor(n_blocks) if counted else n_blocks, prefix, *weights[:2]).output
        h.backward(torch.empty_like(h))

    assert KERNEL in kernels(call)
    banks.check(given, n_blocks, counted=counted)


@pytest.mark.parametrize("by_token", [True, False], ids=["as kept", "copied"])
def test_statistics_may_lie_in_either_order(chip, by_token):
    """A backward in several rows a tile, or one after a copy of the statistics, computes the same."""
    case = depth.make(3, 5, WHOLE, torch.bfloat16)
    given = ([case.blocks], None, None)
    weights = (case.query, case.rms_weight, None)
    h, _, _, score, rstd, lse, _ = OPS.attn_res(*given, None, *weights, True, 3, case.eps, 1e-6, None, True)
    assert score.stride() == (1, 3) and rstd.stride() == (1, 3)
    if not by_token:
        score, rstd = score.contiguous(), rstd.contiguous()
    needed = ([True], False, [True, True, False])
    gradients, _, *weights_gradients, _ = OPS.attn_res_backward(
        case.dh, None, None, None, *given, *weights, score, rstd, lse, None, True, 3, *needed
    )
    depth.check(case, (h, gradients[0], *weights_gradients))


def test_the_compiler_is_told_how_statistics_lie(chip):
    case = depth.make(2, 3, WHOLE, torch.bfloat16)
    given = ([case.blocks], None, None, None, case.query, case.rms_weight, None, True, 2, 1e-6, 1e-6, None, True)
    torch.library.opcheck(OPS.attn_res.default, given, test_utils="test_faketensor")


def test_statistics_are_by_token_where_the_kernel_takes_them():
    b4, ascend950, b1 = (npu_tiling.soc(name) for name in (CHIP, "Ascend950PR_957b", "Ascend910B1"))
    assert statistics_by_token(4096, 2, 8, b4) and statistics_by_token(7168, 2, 64, b1)
    assert not statistics_by_token(4096, 4, 8, b4)  # fp32 has h
    assert not statistics_by_token(1024, 2, 8, b4)  # rows share a tile
    assert not statistics_by_token(8192, 2, 8, b4)  # two halves do not fit
    assert not statistics_by_token(4096, 2, 65, b4)
    assert not statistics_by_token(4096, 2, 8, ascend950)


@pytest.mark.compilers
@compilers
@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
@pytest.mark.parametrize("width", [WHOLE, HALVES])
@pytest.mark.parametrize("listed", [False, True], ids=["stacked", "list"])
def test_predicted_time_is_near_the_time_of_the_bytes(width, listed, toolchain):
    """1.75 times the floor of peak bandwidth. CANN 8.5 at times makes a module of 1.85 of the same source."""
    tokens, n_blocks = 2048, 8
    blocks = torch.empty(n_blocks, tokens, width, dtype=torch.bfloat16)
    given = [block.requires_grad_() for block in blocks.unbind()] if listed else blocks.requires_grad_()
    weights = [torch.empty(width, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    with npu_offline.record(CHIP) as records:
        attn_res(given, *weights).backward(torch.empty(tokens, width, dtype=torch.bfloat16))
    (record,) = [record for record in records if record.name == KERNEL]
    costs = costs_of(CHIP)
    seconds = time_launch(record, soc=CHIP, toolchain=toolchain).estimate
    floor = (2 * n_blocks + 1) * tokens * width * 2 / costs.peak_bandwidth
    assert seconds < (1.85 if toolchain == "1.0.0" and width == HALVES else 1.75) * floor
