"""A row of the output is a copy, whatever the other indices are and however many."""

import pytest
import torch
from npu_embedding import embedding

pytestmark = pytest.mark.usefixtures("npu_poisoned")


@pytest.mark.parametrize(("width", "dtype"), [(64, torch.bfloat16), (100, torch.float32), (1000, torch.float16)])
@pytest.mark.parametrize("count", [1, 2, 33, 500])
def test_embedding(device, width, dtype, count):
    torch.manual_seed(0)
    weight = torch.randn(300, width).to(dtype)
    indices = torch.randint(0, 300, (500,))
    for first in (0, 500 - count):
        some = indices[first : first + count]
        assert torch.equal(embedding(some.to(device.torch), weight.to(device.torch)).cpu(), weight[some])
