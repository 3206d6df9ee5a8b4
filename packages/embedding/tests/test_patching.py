"""`patch`, without transformers: its classes are stood in for by one of the same name and place."""

import copy
import warnings

import pytest
import torch
from npu_embedding import Embedding, patch
from torch import nn

from testing.other_paths import FunctionMode, OperatorMode, Packed, replaced, tripled


class Gemma3TextScaledWordEmbedding(nn.Embedding):
    __module__ = "transformers.models.gemma3.modeling_gemma3"

    def forward(self, input_ids):
        return super().forward(input_ids) * 3


class Named(nn.Embedding):
    """With a forward that is torch's."""


class Scaled(nn.Embedding):
    """With one of its own, which may do anything."""

    def forward(self, input_ids):
        return super().forward(input_ids) * 3


def test_embeddings_of_every_kind(device):
    kinds = (nn.Embedding, Gemma3TextScaledWordEmbedding, Named)
    model = nn.ModuleList([*(kind(10, 64, padding_idx=2) for kind in kinds), Scaled(10, 64)]).to(device.torch)
    indices = torch.tensor([[1, 2, 2], [9, 1, 1]], device=device.torch)
    state, results = model.state_dict(keep_vars=True), []
    for _ in range(2):
        model.zero_grad()
        rows = [module(indices) for module in model]
        torch.stack(rows).square().sum().backward()
        results.append([(y.detach(), module.weight.grad) for y, module in zip(rows, model, strict=True)])
        report = patch(model)
    for (y, gradient), (expected, expected_gradient) in zip(*results, strict=True):
        assert torch.equal(y, expected)
        assert torch.allclose(gradient, expected_gradient, rtol=1e-6)
    assert {entry.name for entry in report.left} == {"0", "1", "2", "3"}  # the second time
    assert type(model[0]) is Embedding
    assert isinstance(model[1], Embedding) and isinstance(model[1], Gemma3TextScaledWordEmbedding)
    assert type(model[3]) is Scaled
    assert all(state[name] is tensor for name, tensor in model.state_dict(keep_vars=True).items())


def test_kernels_see_the_look_up_of_a_scaled_embedding(device):
    model = Gemma3TextScaledWordEmbedding(10, 64).to(device.torch)
    patch(model)
    outside = torch.tensor([1, 10], device=device.torch)
    if device.name == "cpu":
        with pytest.raises(IndexError, match="10"):
            model(outside)
    else:
        y = model(outside)  # torch's own would stop the process on a GPU
        assert torch.isnan(y[1]).all()
        assert torch.isfinite(y[0]).all()


def test_what_is_not_known_is_left_and_named():
    narrow, sharded = nn.Embedding(4, 8).to(torch.float8_e4m3fn), nn.Embedding(4, 8)
    sharded.weight = nn.Parameter(torch.ones(4, 8).as_subclass(type("Shard", (torch.Tensor,), {})))
    halved = nn.Embedding(4, 8)
    nn.utils.parametrize.register_parametrization(halved, "weight", nn.Identity())
    report = patch(nn.ModuleList([Scaled(4, 8), narrow, sharded, halved, nn.Linear(4, 8)]))
    assert report.replaced == ()
    assert [entry.text for entry in report.left] == [
        "its forward is not torch.nn.Embedding's",
        "its weight is torch.float8_e4m3fn, which embedding does not take",
        "its weight is a Shard and no plain parameter",
        "it has parametrizations: patch it before they are registered",
    ]
    nn.utils.parametrize.remove_parametrizations(halved, "weight")


def test_can_be_copied_and_undone():
    model = nn.Sequential(Gemma3TextScaledWordEmbedding(10, 8), nn.Linear(8, 10, bias=False))
    model[1].weight = model[0].weight
    with patch(model):
        twin = copy.deepcopy(model)
        assert model[1].weight is model[0].weight
    assert type(model[0]) is Gemma3TextScaledWordEmbedding
    assert twin[1].weight is twin[0].weight
    assert isinstance(twin[0], Embedding)
    assert torch.equal(twin(torch.arange(10)), model(torch.arange(10)))


def packed(module):
    return replaced(module, "weight", lambda weight: nn.Parameter(Packed(weight.detach()), requires_grad=False))


OTHER_PATHS = {
    "class": lambda module: replaced(nn.Embedding, "forward", tripled),
    "function": lambda module: replaced(nn.functional, "embedding", tripled),
    "mode of functions": lambda module: FunctionMode(),
    "mode of operators": lambda module: OperatorMode(),
    "weight": packed,
}


@pytest.mark.parametrize("kind", [nn.Embedding, Gemma3TextScaledWordEmbedding, Embedding])
@pytest.mark.parametrize("path", OTHER_PATHS)
def test_what_torch_would_see_or_change_is_left_to_torch(path, kind):
    module, indices = kind(10, 8), torch.tensor([1, 2])
    expected = module(indices)
    report = patch(module)
    with OTHER_PATHS[path](module), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(module(indices), 3 * expected)
    assert len(report.fell_back) == len(report.replaced)
    assert torch.equal(module(input_ids=indices) if "Gemma" in kind.__name__ else module(input=indices), expected)


@pytest.mark.parametrize("path", ["class", "function"])
def test_what_was_replaced_before_is_left_and_named(path):
    with OTHER_PATHS[path](None):
        report = patch(nn.ModuleList([nn.Embedding(4, 8), Gemma3TextScaledWordEmbedding(4, 8)]))
    assert not report.replaced
    assert all("was replaced" in entry.text for entry in report.left)


def test_a_table_that_became_fp8_is_looked_up_by_torch():
    module, indices = nn.Embedding(4, 8), torch.tensor([1, 2])
    patch(module)
    module.to(torch.float8_e4m3fn)
    with pytest.warns(UserWarning, match="its weight is torch.float8_e4m3fn, which embedding does not take"):
        assert torch.equal(module(indices).float(), module.weight.float()[indices])


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_exporters_get_torchs_look_up():
    model, indices = nn.Sequential(nn.Embedding(4, 8), nn.Tanh()), torch.tensor([1, 2])
    report = patch(model)
    for made in (torch.jit.trace(model, (indices,), check_trace=False), torch.fx.symbolic_trace(model)):
        assert torch.equal(made(indices), model(indices))
    assert report.fell_back == ()
