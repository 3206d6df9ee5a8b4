"""reference.py is the definition: against the paper's formula; its gradients: test_operators.py."""

import depth
import pytest
import torch
from npu_attn_res import attn_res


@pytest.mark.parametrize("listed", [False, True])
def test_formula_and_weights(listed):
    torch.manual_seed(0)
    blocks, query, rms_weight = torch.randn(5, 2, 3, 8).double(), torch.randn(8).double(), torch.randn(8).double()
    h, *_, alpha = attn_res(list(blocks) if listed else blocks, query, rms_weight, rms_eps=1e-3, return_weights=True)
    for actual, expected in zip((h, alpha), depth.formula(blocks, query, rms_weight, 1e-3), strict=True):
        assert torch.allclose(actual, expected, rtol=1e-12)


def test_no_query_gives_the_mean():
    blocks = torch.randn(4, 6, 8).double()
    assert torch.allclose(attn_res(blocks, torch.zeros(8), torch.ones(8)), blocks.mean(0), rtol=1e-12)


def test_order_of_the_blocks_does_not_matter():
    torch.manual_seed(0)
    blocks, query, rms_weight = torch.randn(5, 6, 8).double(), torch.randn(8).double(), torch.randn(8).double()
    shuffled = attn_res(blocks[[3, 1, 4, 0, 2]], query, rms_weight)
    assert torch.allclose(attn_res(blocks, query, rms_weight), shuffled, rtol=1e-12)
