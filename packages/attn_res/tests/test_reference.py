"""reference.py is the definition: against the paper's formula, and derivatives."""

import depth
import pytest
import torch
from npu_attn_res import attn_res, attn_res_merge, attn_res_phase1


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


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


@pytest.mark.parametrize("n_blocks", [1, 2, 5])
def test_gradients_are_the_derivatives(n_blocks):
    torch.manual_seed(0)
    blocks, weights = randn(n_blocks, 3, 6), [randn(6) for _ in range(3)]
    assert torch.autograd.gradcheck(lambda v, q, n: attn_res(v, q, n, rms_eps=1e-2), (blocks, *weights[:2]))
    listed = [block.detach().requires_grad_() for block in blocks]
    assert torch.autograd.gradcheck(lambda q, n, *v: attn_res(v, q, n, rms_eps=1e-2), (*weights[:2], *listed))
    normalised = lambda v, q, n, w: attn_res(v, q, n, w, 1e-2, -0.7)[:2]  # noqa: E731
    assert torch.autograd.gradcheck(normalised, (blocks, *weights))


@pytest.mark.parametrize("norms", [(6,), (4, 6)])
def test_gradients_of_the_first_phase_are_the_derivatives(norms):
    torch.manual_seed(0)
    inputs = randn(4, 6), randn(3, 5, 6), randn(*norms)
    assert torch.autograd.gradcheck(lambda q, v, n: attn_res_phase1(q, v, n, 1e-2, 0.6), inputs)


@pytest.mark.parametrize("with_output", [False, True])
def test_gradients_of_the_second_phase_are_the_derivatives(with_output):
    torch.manual_seed(0)
    inputs = [randn(5, 6), randn(5), *(randn(5, 6) for _ in range(2)), *(randn(6) for _ in range(3))]

    def function(o, lse, partial, x, query, rms_weight, weight):
        x = x if with_output else None
        options = {"layer_output": x, "output_rms_weight": weight, "output_rms_eps": 1e-2}
        h, y, joined, _ = attn_res_merge(o, lse, partial, query, rms_weight, rms_eps=1e-2, **options)
        return [h, y, joined] if with_output else [h, y]

    if not with_output:
        inputs[3].requires_grad_(False)
    assert torch.autograd.gradcheck(function, inputs)
