"""A token's bits depend on its own blocks alone: not on the other tokens, on how many there are, or on where it stands."""

import pytest
import torch
from npu_attn_res import attn_res

pytestmark = pytest.mark.usefixtures("npu_poisoned")

TOKENS = 67
SHARES = [(0, 1), (66, 67), (3, 10), (1, 67)]  # first and last token of what is computed apart
CASES = [  # columns, dtype, blocks, whether they are a list
    (64, torch.bfloat16, 4, False),
    (100, torch.float32, 9, True),
    (1000, torch.float16, 4, False),
    (4096, torch.bfloat16, 9, True),
    (20000, torch.float32, 4, False),
]


def inputs(n, width, dtype, device):
    torch.manual_seed(0)
    blocks, others = (torch.randn(n, TOKENS, width).to(dtype).to(device) for _ in range(2))
    query, norm, weight = (torch.randn(width).to(dtype).to(device) for _ in range(3))
    return blocks, others, query * width**-0.5, norm, weight


@pytest.mark.parametrize(("width", "dtype", "n", "listed"), CASES)
def test_attn_res(device, width, dtype, n, listed):
    blocks, others, query, norm, weight = inputs(n, width, dtype, device.torch)

    def run(blocks):
        blocks = [block.clone() for block in blocks] if listed else blocks.contiguous()
        return attn_res(blocks, query, norm, output_rms_weight=weight, return_weights=True)

    whole = run(blocks)
    for first, last in SHARES:
        h, y, _, alpha = run(blocks[:, first:last])
        assert torch.equal(h, whole[0][first:last])
        assert torch.equal(y, whole[1][first:last])
        assert torch.equal(alpha, whole.weights[:, first:last])
    order = torch.randperm(TOKENS, device=device.torch)
    assert torch.equal(run(blocks[:, order])[0], whole[0][order])
    assert torch.equal(run(torch.cat((others, blocks), 1))[1][TOKENS:], whole[1])
