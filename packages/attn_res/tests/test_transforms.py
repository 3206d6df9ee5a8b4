"""torch.func.vmap of calls that write to a bank or a prefix."""

import banks
import pytest
import torch
from npu_attn_res import attn_res_bank

CALLS = 3


def stacked(device):
    """A bank, a prefix and a layer's output for each of several calls, and weights for all."""
    made = [banks.tensors(device, 4, bank=torch.float32, prefix=torch.float32, width=16) for _ in range(CALLS)]
    rows = [torch.stack([given[i] * (1 + j) for j, given in enumerate(made)]) for i in range(3)]
    return [rows[0].nan_to_num(), *rows[1:], *made[0][3:]]


@pytest.mark.few(2)
@pytest.mark.parametrize("in_place", [False, True], ids=["", "in place"])
@pytest.mark.parametrize("count", [3, torch.tensor(3), torch.tensor(5)], ids=["int", "on the device", "full"])
def test_each_call_writes_to_its_own_bank(device, count, in_place):
    bank, prefix, x, *weights = stacked(device)
    count = count.to(device.torch) if isinstance(count, torch.Tensor) else count

    def call(bank, prefix, x):
        options = {"layer_output": x, "append": True, "in_place": in_place, "return_weights": True}
        return tuple(attn_res_bank(bank, count, prefix, *weights, **options))

    expected = [bank.clone(), prefix.clone()]
    results = [call(*rows, x[i]) for i, rows in enumerate(zip(*expected, strict=True))]
    written = [bank.clone(), prefix.clone()]
    for one, each in zip(torch.func.vmap(call)(*written, x), zip(*results, strict=True), strict=True):
        assert torch.allclose(one, torch.stack(each), rtol=1e-5, atol=1e-5)
    for one, other in zip(written, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-5)
    assert torch.equal(written[1], prefix) != in_place


@pytest.mark.filterwarnings("error")
def test_a_number_of_blocks_for_each_call(device):
    bank, prefix, _, *weights = stacked(device)
    before, counts = bank.clone(), torch.tensor([1, 4, 7], device=device.torch)
    torch.func.vmap(lambda *given: attn_res_bank(*given, *weights, append=True).output)(bank, counts, prefix)
    changed = (bank != before).any(1).any(-1)
    assert changed.tolist() == [[i == place for i in range(5)] for place in (1, 4, None)]


@pytest.mark.parametrize("option", ["append", "in_place"])
def test_memory_that_all_calls_share_is_refused(device, option):
    bank, prefix, x, *weights = (one[0] if one.dim() > 1 else one for one in stacked(device))
    call = lambda x: attn_res_bank(bank, 3, prefix, *weights, layer_output=x, **{option: True}).output  # noqa: E731
    with pytest.raises(ValueError, match="must be False for a bank or prefix that torch.func.vmap does not map over"):
        torch.func.vmap(call)(torch.stack([x, x]))
