"""Results of final modules: what the compilers hand to the chip, at their addresses, with every check of npu-offline's."""

from types import SimpleNamespace

import banks
import depth
import npu_offline
import pytest
import torch
from npu_attn_res import attn_res, attn_res_bank, attn_res_merge, attn_res_phase1, shape

REASON = "needs triton-ascend and the three toolchains (npu-offline fetch)"
pytestmark = [pytest.mark.compilers, pytest.mark.skipif(len(npu_offline.installed()) < 3, reason=REASON)]
CASES = {  # blocks, tokens, width, dtype, as a list
    "rows that share a tile": (5, 41, 1000, torch.bfloat16, True),
    "two rows a tile": (4, 13, 4096, torch.bfloat16, False),
    "a row a tile": (3, 5, 7168, torch.bfloat16, False),
    "columns": (2, 5, 16384, torch.bfloat16, False),
    "two rows a tile, fp32": (4, 13, 2048, torch.float32, False),
    "one block": (1, 13, 4096, torch.bfloat16, False),
}
PLACE = SimpleNamespace(name="final", torch=torch.device("cpu"))


@pytest.fixture(autouse=True, params=npu_offline.VERSIONS)
def chip(request, monkeypatch):
    """Final modules of each toolchain, in so few programs that each one has several tiles."""
    monkeypatch.setattr(shape, "persistent_grid", lambda tiles, device, *, per_core: min(tiles, 2))
    with npu_offline.emulate("Ascend910B4", toolchain=request.param, checks=True) as emulation:
        yield emulation


@pytest.mark.few(3)
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_formula(name):
    n_blocks, tokens, width, dtype, listed = CASES[name]
    case = depth.make(n_blocks, tokens, width, dtype, sharp=2.0)
    depth.check(case, depth.run(case, "cpu", listed))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("tokens", "width", "bank", "counted"),
    [
        (41, 1000, torch.bfloat16, False),
        (41, 1000, torch.bfloat16, True),
        (5, 7168, torch.bfloat16, False),
        (13, 2048, torch.float32, True),
    ],
    ids=["rows that share a tile", "the same, counted on the device", "a row a tile", "fp32 bank, counted on the device"],
)
def test_a_bank_gives_the_results_of_the_formula(tokens, width, bank, counted):
    n_blocks = 2
    given = banks.tensors(PLACE, tokens, 4, n_blocks, width, bank)
    banks.check(given, n_blocks, counted=counted)
    memory, prefix, x, *weights = given
    count = torch.tensor(n_blocks) if counted else n_blocks
    found = attn_res_bank(memory, count, prefix, *weights, layer_output=x, append=True)
    assert torch.equal(memory[:, n_blocks], found.prefix.to(bank))
    assert memory[:, n_blocks + 1].isnan().all()


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4096), (torch.bfloat16, 6144)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("with_norm", [False, True])
def test_no_flag_is_set_twice_where_a_tile_is_a_row_and_no_gradients_are_asked_for(dtype, width, with_norm):
    """CANN 8.5 did so behind a program's last tile."""
    case = depth.make(3, 5, width, dtype)
    arguments = {"output_rms_weight": torch.ones(width, dtype=dtype), "output_rms_eps": 1e-6} if with_norm else {}
    found = attn_res(case.blocks, case.query, case.rms_weight, **arguments)
    h = found[0] if with_norm else found
    depth.near(h, depth.formula(case.blocks.double(), case.query.double(), case.rms_weight.double(), case.eps)[0])
    if with_norm:
        depth.near(found[1], normalised(h))


@pytest.mark.few(1)
@pytest.mark.parametrize("width", [1024])
def test_scores_that_rise_are_summed_again(width):
    """A later score is higher by hundreds, in one of a program's tiles: fp32 would overflow."""
    case = depth.make(4, 41, width, torch.bfloat16)
    case.blocks[:, 20] = case.query * torch.tensor([0.0, 3.0, -2.0, 5.0])[:, None]
    case.query.mul_(300 / width**0.5 / case.query.norm())
    depth.check(case, depth.run(case, "cpu"))


@pytest.mark.few(1)
@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 7168), (torch.float16, 1000)], ids=["bf16", "fp16"])
def test_what_is_normalised_is_what_was_stored(dtype, width):
    """CANN 8.5's compiler leaves a cast out that is cast back at once."""
    case = depth.make(3, 9, width, dtype)
    output_rms_weight = torch.ones(width, dtype=dtype)
    h, y, *_ = attn_res(case.blocks, case.query, case.rms_weight, output_rms_weight=output_rms_weight, output_rms_eps=1e-6)
    depth.near(y, normalised(h))
    o, lse = attn_res_phase1(case.query[None].float(), case.blocks, case.rms_weight.float())
    h, y, joined, _ = attn_res_merge(
        o[0],
        lse[0],
        case.dh,
        case.query,
        case.rms_weight,
        layer_output=case.blocks[0],
        output_rms_weight=output_rms_weight,
    )
    assert torch.equal(joined, case.dh + case.blocks[0])
    depth.near(y, normalised(h))
    whole, _ = depth.formula(
        torch.stack([*case.blocks, joined]).double(), case.query.double(), case.rms_weight.double(), case.eps
    )
    depth.near(h, whole)


def normalised(h):
    return h.double() * torch.rsqrt(h.double().square().mean(-1, keepdim=True) + 1e-6)
