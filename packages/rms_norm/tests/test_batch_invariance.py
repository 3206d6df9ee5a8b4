"""A row's bits depend on that row alone: not on the other rows, on how many there are, or on where it stands."""

import pytest
import torch
from npu_rms_norm import add_rms_norm, rms_norm

pytestmark = pytest.mark.usefixtures("npu_poisoned")

ROWS = 131
SHARES = [(0, 1), (5, 6), (130, 131), (0, 2), (3, 10), (60, 125), (1, 131)]  # first and last row of what is computed apart
CASES = [(64, torch.bfloat16), (100, torch.float32), (1000, torch.float16), (4096, torch.bfloat16), (40000, torch.float32)]


@pytest.fixture(autouse=True)
def several_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def rows(width, dtype, device):
    torch.manual_seed(0)
    return [(torch.randn(ROWS, width) * torch.rand(ROWS, 1) * 9).to(dtype).to(device) for _ in range(2)]


@pytest.mark.parametrize("mode", ["llama", "none"])
@pytest.mark.parametrize(("width", "dtype"), CASES)
def test_rms_norm(device, width, dtype, mode):
    x, others = rows(width, dtype, device.torch)
    weight = torch.randn(width, dtype=dtype, device=device.torch)
    y = rms_norm(x, weight, casting_mode=mode)
    for first, last in SHARES:
        assert torch.equal(rms_norm(x[first:last].clone(), weight, casting_mode=mode), y[first:last])
        assert torch.equal(rms_norm(x[first:last], weight, casting_mode=mode), y[first:last])
    order = torch.randperm(ROWS, device=device.torch)
    assert torch.equal(rms_norm(x[order], weight, casting_mode=mode), y[order])
    among = torch.where(torch.arange(ROWS, device=device.torch).unsqueeze(1) % 3 == 0, x, others)
    assert torch.equal(rms_norm(among, weight, casting_mode=mode)[::3], y[::3])
    assert torch.equal(rms_norm(torch.cat((others, x)), weight, casting_mode=mode)[ROWS:], y)


@pytest.mark.parametrize(("width", "dtype"), CASES)
def test_add_rms_norm(device, width, dtype):
    x, residual = rows(width, dtype, device.torch)
    weight = torch.randn(width, dtype=dtype, device=device.torch)
    y, total = add_rms_norm(x, residual, weight)
    for first, last in SHARES:
        own, sums = add_rms_norm(x[first:last].clone(), residual[first:last].clone(), weight)
        assert torch.equal(own, y[first:last])
        assert torch.equal(sums, total[first:last])
