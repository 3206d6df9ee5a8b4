"""Forward-mode differentiation, Hessians and vmap: as of the same formula in PyTorch's operators, on every place."""

import pytest
import torch
from npu_attn_res import attn_res, attn_res_merge, attn_res_phase1

from testing import forward_mode


def formula(blocks, query, norm):
    keys = blocks / (blocks.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm
    alpha = torch.softmax(keys @ query, 0)
    return (alpha.unsqueeze(-1) * blocks).sum(0)


def normalised(blocks, query, norm, weight):
    h = formula(blocks, query, norm)
    return torch.cat([h, h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight])


def phases(blocks, query, norm):
    o, lse = attn_res_phase1(torch.stack([query, 2 * query]), list(blocks[:-1].unbind()), norm)
    return attn_res_merge(o[0], lse[0], blocks[-1], query, norm).output


WEIGHTS = [(8,), (8,)]
CALLS = {
    "stacked": (attn_res, formula, [(2, 3, 8), *WEIGHTS]),
    "a list": (lambda blocks, *weights: attn_res(list(blocks.unbind()), *weights), formula, [(2, 3, 8), *WEIGHTS]),
    "normalised": (
        lambda blocks, query, norm, weight: torch.cat(attn_res(blocks, query, norm, weight)[:2]),
        normalised,
        [(2, 3, 8), *WEIGHTS, (8,)],
    ),
    "two phases": (phases, formula, [(3, 3, 8), *WEIGHTS]),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("taken", forward_mode.TAKEN)
@pytest.mark.filterwarnings("ignore:.*batching rule")
def test_is_that_of_the_formula(device, what, taken):
    dtype = torch.float64 if device.name == "cpu" else torch.float32
    forward_mode.check(*CALLS[what], taken, device.torch, dtype)
