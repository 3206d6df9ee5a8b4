"""Under autocast layers return 16 bits, and what they are added to has 32."""

import decoder
import depth
import pytest
import torch
from npu_attn_res import AttnResBank, BlockAttnRes, attn_res

WIDTH = 256


def through_depth(attention, layers, embedding):
    state = attention.start(embedding)
    for layer in layers:
        state.add(layer(state.input()))
    return state.input()


@pytest.mark.few(1)
@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_block_attn_res_trains_as_it_does_without_autocast(device, block_size):
    torch.manual_seed(0)
    attention = BlockAttnRes(WIDTH, n_inputs=6, block_size=block_size, device=device.torch)
    torch.nn.init.normal_(attention.query, std=0.1)
    layers = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH, device=device.torch) for _ in range(5)])
    embedding = torch.randn(2, 7, WIDTH, device=device.torch, requires_grad=True)
    leaves = [embedding, *attention.parameters(), *layers.parameters()]
    results = []
    for enabled in (False, True):
        with torch.autocast(device.torch.type, torch.bfloat16, enabled=enabled):
            h = through_depth(attention, layers, embedding)
        assert h.dtype == torch.float32
        results.append([h, *torch.autograd.grad(h.square().sum(), leaves)])
    for plain, cast in zip(*results, strict=True):
        assert cast.dtype == plain.dtype
        assert (cast - plain).norm() < 0.03 * plain.norm()


@pytest.mark.few(0)
def test_a_decoder_whose_blocks_differ_in_dtype(device):
    torch.manual_seed(0)
    model = decoder.Decoder(AttnResBank, dtype=torch.float32).to(device.torch)
    tokens = torch.randint(0, 50, (2, 9), device=device.torch)
    plain = model(tokens)
    with torch.autocast(device.torch.type, torch.bfloat16):
        cast = model(tokens)
    cast.float().square().mean().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
    assert (cast - plain).norm() < 0.05 * plain.norm()


def test_listed_blocks_become_the_widest_of_their_dtypes_as_by_stack(device):
    case = depth.make(3, 5, WIDTH, torch.float32)
    weights = case.query.to(device.torch), case.rms_weight.to(device.torch)
    blocks = [one.to(device.torch) for one in case.blocks]
    mixed = [blocks[0].bfloat16(), *blocks[1:]]
    with torch.autocast(device.torch.type, torch.bfloat16):
        found = attn_res(mixed, *weights)
    assert torch.equal(found, attn_res([mixed[0].float(), *blocks[1:]], *weights))
    with pytest.raises(TypeError, match=r"residuals\[1\] is torch.float32 and must be torch.bfloat16"):
        attn_res(mixed, *weights)
