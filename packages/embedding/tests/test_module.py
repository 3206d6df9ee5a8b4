"""`Embedding` is a drop-in: what torch checks of its nn.Embedding, and both side by side."""

import copy
import pickle

import pytest
import torch
from npu_embedding import Embedding, embedding, embedding_bag

SETTINGS = [
    {},
    {"padding_idx": 0},
    {"padding_idx": -2},
    {"max_norm": 1.0},
    {"max_norm": 3.0, "norm_type": 1.0},
    {"scale_grad_by_freq": True},
    {"sparse": True},
    {"sparse": True, "padding_idx": 4},
]


@pytest.mark.few(3)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_trains_as_torch_does(device, settings):
    torch.manual_seed(0)
    theirs = torch.nn.Embedding(12, 16, **settings)
    ours = Embedding(12, 16, **settings, device=device.torch)
    ours.load_state_dict(theirs.state_dict())
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (ours, theirs)]
    for step in range(3):
        indices = torch.randint(0, 12, (5, 4), generator=torch.Generator().manual_seed(step))
        for module, optimizer, place in zip((ours, theirs), optimizers, (device.torch, "cpu"), strict=True):
            optimizer.zero_grad()
            out = module(indices.to(place))
            (out * torch.linspace(-1, 1, 16, device=place)).square().sum().backward()
            optimizer.step()
        assert torch.allclose(ours.weight.cpu(), theirs.weight, rtol=1e-5, atol=1e-6)
    assert ours.weight.grad.is_sparse == theirs.weight.grad.is_sparse


def test_state_dict_attributes_and_repr():
    settings = {"padding_idx": -1, "max_norm": 2.0, "norm_type": 1.0, "scale_grad_by_freq": True, "sparse": True}
    ours, theirs = Embedding(9, 4, **settings), torch.nn.Embedding(9, 4, **settings)
    assert list(ours.state_dict()) == list(theirs.state_dict()) == ["weight"]
    assert repr(ours) == repr(theirs)
    assert ours.padding_idx == 8
    for name in theirs.__constants__:
        assert getattr(ours, name) == getattr(theirs, name)
    assert isinstance(ours, torch.nn.Embedding)


def test_initial_values_are_torchs():
    torch.manual_seed(3)
    theirs = torch.nn.Embedding(9, 4, padding_idx=2)
    torch.manual_seed(3)
    ours = Embedding(9, 4, padding_idx=2)
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.weight[2], torch.zeros(4))


META = [
    lambda ids, table: embedding(ids, table, multiplier=2.0),
    lambda ids, table: embedding(ids, table, rms_norm_eps=1e-6),
    lambda ids, table: embedding(ids, table.to(torch.int8), row_scales=table[:, 0]),
    lambda ids, table: embedding(ids, table, max_norm=1.0),
    lambda ids, table: embedding_bag(ids, table).unsqueeze(1).expand(2, 5, 3),
    lambda ids, table: embedding_bag(ids, table, mode="concat").view(2, 5, 3),
]


@pytest.mark.parametrize("look_up", META)
def test_tensors_without_data_have_shapes(look_up):
    assert look_up(torch.zeros(2, 5, dtype=torch.int64, device="meta"), torch.empty(4, 3, device="meta")).shape == (2, 5, 3)


def test_device_dtype_and_given_weight():
    module = Embedding(4, 3, device="meta", dtype=torch.bfloat16)
    assert module.weight.device.type == "meta"
    assert module.weight.dtype == torch.bfloat16
    assert module(torch.zeros(2, 5, dtype=torch.int32, device="meta")).shape == (2, 5, 3)
    table = torch.rand(4, 3)
    assert torch.equal(Embedding(4, 3, _weight=table, _freeze=True).weight, table)
    assert not Embedding(4, 3, _weight=table, _freeze=True).weight.requires_grad


@pytest.mark.parametrize("freeze", [True, False])
def test_from_pretrained(device, freeze):
    table = torch.tensor([[1.0, 2.3, 3.0], [4.0, 5.1, 6.3]], device=device.torch)
    module = Embedding.from_pretrained(table, freeze=freeze, padding_idx=-1, max_norm=20.0, norm_type=1.0, sparse=True)
    assert type(module) is Embedding
    assert (module.padding_idx, module.max_norm, module.norm_type, module.sparse) == (1, 20.0, 1.0, True)
    assert module.weight.requires_grad is not freeze
    assert torch.equal(module(torch.tensor([1], device=device.torch)), table[1:])


def test_from_pretrained_keeps_the_padding_row(device):
    table = torch.ones(3, 4, device=device.torch)
    module = Embedding.from_pretrained(table, padding_idx=2, freeze=False)
    out = module(torch.tensor([2, 0], device=device.torch))
    assert torch.equal(out, table[:2])
    out.sum().backward()
    assert torch.equal(module.weight.grad[:, 0].cpu(), torch.tensor([1.0, 0.0, 0.0]))


@pytest.mark.parametrize("make", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies(make):
    module = Embedding(5, 3, padding_idx=1)
    again = make(module)
    assert type(again) is Embedding
    assert torch.equal(again(torch.arange(5)), module(torch.arange(5)))
    assert again.weight.data_ptr() != module.weight.data_ptr()


@pytest.mark.uncollected(
    "torch_npu's sparse_mask leaves out rows of zeros, and the optimizer's first step fails", lambda place: place == "npu"
)
def test_sparse_gradient_feeds_sparse_adam(device):
    torch.manual_seed(0)
    theirs = torch.nn.Embedding(12, 16, sparse=True)
    ours = Embedding(12, 16, sparse=True, device=device.torch)
    ours.load_state_dict(theirs.state_dict())
    indices = torch.tensor([3, 3, 7, 1])
    for module, place in ((ours, device.torch), (theirs, "cpu")):
        optimizer = torch.optim.SparseAdam(module.parameters(), lr=0.1)
        module(indices.to(place)).square().sum().backward()
        optimizer.step()
    assert torch.allclose(ours.weight.cpu(), theirs.weight, rtol=1e-5, atol=1e-6)
