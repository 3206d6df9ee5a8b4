"""A decoder of Attention Residuals: it trains as one of PyTorch's operators does, and keeps no block twice."""

import functools

import decoder
import pytest
import torch
from npu_attn_res import AttnResBank
from torch.utils.checkpoint import checkpoint


@pytest.mark.few(0)
def test_it_trains_as_plain_pytorch_does(device):
    steps, dtype = (4, torch.float64) if device.name == "cpu" else (3, torch.float32)
    tokens = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0)).to(device.torch)
    models = [decoder.Decoder(mix, dtype=dtype).to(device.torch) for mix in (AttnResBank, decoder.PlainMix)]
    ours, plain = (decoder.train(model, steps, tokens) for model in models)
    assert plain[-1] < plain[0]
    assert ours == pytest.approx(plain, rel=1e-6 if dtype == torch.float64 else 1e-4)


def kept(device, around):
    """The places of rows that are kept for the backward of a forward pass, and the model's gradients."""
    model = decoder.Decoder(dtype=torch.float32).to(device.torch)
    tokens = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0)).to(device.torch)
    mixed, places = [], set()
    for mix in (module for module in model.modules() if isinstance(module, AttnResBank)):
        mix.register_forward_hook(lambda module, given, found: mixed.append((found, given[0])))

    def pack(tensor):
        if tensor.shape[-1:] == (32,) and tensor.numel() == 2 * 8 * 32:
            places.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = model(tokens[:, :-1], around)
    logits.square().sum().backward()
    return places, mixed, [parameter.grad for parameter in model.parameters()]


def test_a_forward_pass_keeps_blocks_and_prefixes_once(device):
    """A mix keeps its blocks where they are, the new prefix, h for the gradient of its RMSNorm, and what that gives."""
    places, mixed, _ = kept(device, None)
    blocks = {block.untyped_storage().data_ptr() for _, bank in mixed for block in bank}
    rows = {one.untyped_storage().data_ptr() for found, _ in mixed for one in found[:3]}
    assert blocks <= places
    own = places - rows  # of attention and the MLP
    assert len(own) <= 2 * len([1 for _ in mixed])


def test_checkpoints_keep_no_block_twice(device):
    """What goes into a layer is kept, which is the blocks themselves; nothing in between is."""
    around = functools.partial(checkpoint, use_reentrant=False)
    places, mixed, gradients = kept(device, around)
    n_layers, n_blocks = 4, 2
    # Every layer's prefix and output; blocks are former prefixes. The last mix is outside: its prefix, and its h.
    assert len(places) <= n_blocks + 2 * n_layers + 2
    for one, other in zip(gradients, kept(device, None)[2], strict=True):
        assert torch.equal(one, other)
