"""`fused_attnres`, which takes the arguments of flash-linear-attention's, against the formula and against theirs."""

import importlib.util
from pathlib import Path

import depth
import pytest
import torch
from npu_attn_res import attn_res, attn_res_phase1, fused_attnres

SCALE, EPS = 0.3, 1e-3


def theirs():
    """fla's formula, which is plain PyTorch, from its file: its package asks for a GPU when it is imported."""
    pytest.importorskip("einops", reason="needs einops")
    package = importlib.util.find_spec("fla")
    if package is None:
        pytest.skip("needs fla-core")
    (folder,) = package.submodule_search_locations
    spec = importlib.util.spec_from_file_location("fla_naive", Path(folder, "ops", "attnres", "naive.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.naive_attnres


def inputs(device):
    case = depth.make(3, (2, 5), 64, torch.float32, sharp=3.0)
    generator = torch.Generator().manual_seed(1)
    output = 1 + 0.3 * torch.randn(64, generator=generator)
    return [one.to(device) for one in (case.query, case.blocks, case.rms_weight, output)]


@pytest.mark.few(2)
@pytest.mark.parametrize("normalised", [False, True], ids=["", "normalised"])
@pytest.mark.parametrize("column", [False, True], ids=["a row", "a column"])
def test_it_is_the_formula(device, normalised, column):
    query, blocks, rms_weight, output = inputs(device.torch)
    h, alpha = depth.formula(blocks.double(), SCALE * query.double(), rms_weight.double(), EPS)
    wanted = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS) * output if normalised else h
    query = query[:, None] if column else query
    given = (query, list(blocks.unbind()), rms_weight, output if normalised else None, EPS, SCALE)
    found, weights = fused_attnres(*given, return_weights=True)
    depth.near(found.cpu(), wanted.cpu())
    assert torch.allclose(weights.double(), alpha, rtol=1e-4)
    assert torch.equal(fused_attnres(*given), found)


def test_its_levels_of_checkpointing_are_the_same_here():
    query, blocks, rms_weight, _ = inputs("cpu")
    found = fused_attnres(query, blocks, rms_weight)
    assert all(torch.equal(fused_attnres(query, blocks, rms_weight, checkpoint_level=level), found) for level in (0, 1))
    with pytest.raises(ValueError, match="checkpoint_level is 2 and must be 0 or 1"):
        fused_attnres(query, blocks, rms_weight, checkpoint_level=2)


def test_scores_are_scaled_in_every_form(device):
    query, blocks, rms_weight, _ = inputs(device.torch)
    expected, _ = depth.formula(blocks.cpu().double(), SCALE * query.cpu().double(), rms_weight.cpu().double(), EPS)
    depth.near(attn_res(blocks, query, rms_weight, rms_eps=EPS, scale=SCALE).cpu(), expected)
    o, _ = attn_res_phase1(query[None], blocks, rms_weight, EPS, SCALE)
    depth.near(o[0].cpu(), expected)


@pytest.mark.parametrize("normalised", [False, True], ids=["", "normalised"])
def test_results_and_gradients_are_those_of_fla(device, normalised):
    results = []
    for function in (theirs(), fused_attnres):
        query, blocks, *weights = (one.requires_grad_() for one in inputs(device.torch))
        listed = [block.detach().requires_grad_() for block in blocks]
        given = (query, listed, weights[0], weights[1] if normalised else None, EPS, SCALE)
        found = function(*given)
        leaves = [query, *listed, *weights[: 1 + normalised]]
        upstream = torch.linspace(-1, 1, found.numel(), device=device.torch).view(found.shape)
        results.append((found, *torch.autograd.grad(found, leaves, upstream)))
    for expected, actual in zip(*results, strict=True):
        depth.near(actual.detach().cpu(), expected.detach().cpu().double(), fp32=1e-4)
