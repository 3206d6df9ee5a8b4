"""`patch`, without transformers: its classes are stood in for by ones of the same name and place."""

import copy
import pickle

import pytest
import torch
from npu_rms_norm import RMSNorm, patch, use_kernels
from npu_rms_norm.patching import FORMULAS, GATED
from torch import nn

from testing.other_paths import FunctionMode, Packed, replaced, tripled


def known_class(name, *, module="transformers.models.any.modeling_any", eps="variance_epsilon", start=torch.ones):
    def initialise(self, width):
        nn.Module.__init__(self)
        self.weight = nn.Parameter(start(width))
        setattr(self, eps, 1e-5)

    def forward(self, hidden_states):
        raise AssertionError("the original forward ran")

    return type(name, (nn.Module,), {"__init__": initialise, "forward": forward, "__module__": module})


def formula(x, weight, eps, offset, llama):
    """As transformers writes it: Llama rounds before the weight and promotes, the others round the result."""
    normalised = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    if llama:
        return weight * normalised.to(x.dtype)
    return (normalised * (offset + weight.float())).to(x.dtype)


@pytest.mark.parametrize("name", ["LlamaRMSNorm", "Olmo2RMSNorm", "GemmaRMSNorm"])
@pytest.mark.parametrize("dtypes", [("float32",) * 2, ("bfloat16",) * 2, ("bfloat16", "float32"), ("float32", "bfloat16")])
def test_rounds_as_the_class_does(name, dtypes):
    dtype, weight_dtype = (getattr(torch, each) for each in dtypes)
    module = known_class(name, eps=FORMULAS[name].eps)(64).to(weight_dtype)
    nn.init.normal_(module.weight)
    assert patch(module).replaced
    x = torch.randn(3, 5, 64).to(dtype)
    y = module(x)
    expected = formula(x, module.weight, 1e-5, FORMULAS[name].offset, name == "LlamaRMSNorm")
    assert y.dtype == expected.dtype
    assert torch.equal(y, expected)
    y.sum().backward()
    assert module.weight.grad.dtype == weight_dtype


def gated_formula(name, module, x, gate):
    """As transformers writes it."""
    wide, act = x.float(), torch.sigmoid if module.activation == "sigmoid" else nn.functional.silu
    eps = module.variance_epsilon
    if name.startswith("Mamba"):
        wide = wide if gate is None else wide * nn.functional.silu(gate.float())
        wide = wide.unflatten(-1, (-1, module.group_size))
        wide = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).flatten(-2)
        return module.weight * wide.to(x.dtype)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    wide = module.weight.float() * wide if name.startswith("Kimi") else module.weight * wide.to(x.dtype)
    return (wide * act(gate.float())).to(x.dtype)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Qwen3NextRMSNormGated", {"activation": "silu"}),
        ("KimiLinearRMSNormGated", {"activation": "sigmoid"}),
        ("MambaRMSNormGated", {"group_size": 64}),
        ("MambaRMSNormGated", {"group_size": 16}),
        ("MambaRMSNormGated", {"group_size": 64, "gated": False}),
    ],
)
@pytest.mark.parametrize("dtypes", [("float32",) * 2, ("bfloat16",) * 2, ("bfloat16", "float32"), ("float32", "bfloat16")])
def test_gated_norms_round_as_the_class_does(name, options, dtypes):
    dtype, weight_dtype = (getattr(torch, each) for each in dtypes)
    module = known_class(name)(64).to(weight_dtype)
    module.activation, module.group_size = options.get("activation", "silu"), options.get("group_size")
    nn.init.normal_(module.weight)
    assert patch(module).replaced
    x, gate = torch.randn(3, 5, 64).to(dtype), torch.randn(3, 5, 64).to(dtype)
    gate = gate if options.get("gated", True) else None
    y, expected = module(x, gate), gated_formula(name, module, x, gate)
    assert y.dtype == expected.dtype
    assert torch.equal(y, expected)
    y.sum().backward()
    assert module.weight.grad.dtype == weight_dtype


def test_an_activation_that_is_not_known_is_left_and_named():
    module = known_class("Qwen3NextRMSNormGated")(8)
    module.activation = "gelu"
    (left,) = patch(module).left
    assert "'gelu'" in left.text


def test_every_gated_class_has_one_of_three_formulas():
    assert len(GATED) == 13
    assert all(name.endswith("RMSNormGated") for name in GATED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("options", [{}, {"eps": 1e-3}, {"elementwise_affine": False}])
def test_torch_rms_norm_gives_the_same(dtype, options):
    module = nn.RMSNorm(64, **options).to(dtype)
    if module.weight is not None:
        nn.init.normal_(module.weight)
    x = 1e-3 * torch.randn(3, 64, dtype=dtype)  # so small that eps counts
    expected = module(x)
    with patch(module) as report:
        assert isinstance(module, nn.RMSNorm)
        actual = module(x)
    assert len(report.replaced) == 1
    assert type(module) is nn.RMSNorm
    assert torch.allclose(actual, expected, rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_kernels_run_in_place_of_the_forward(device):
    module = nn.RMSNorm(64, eps=1e-6).to(device.torch)
    nn.init.normal_(module.weight)
    x = torch.randn(3, 64, device=device.torch)
    expected = module(x)
    patch(module)
    assert torch.allclose(module(x), expected, rtol=1e-5, atol=1e-6)


def test_what_is_not_known_is_left_and_named():
    class LlamaRMSNorm(nn.RMSNorm):
        """Of the user's own, with a known name."""

    gated = known_class("OtherRMSNormGated")(8)
    quantised, hooked = known_class("LlamaRMSNorm")(8), nn.RMSNorm(8)
    quantised.weight = nn.Parameter(torch.ones(8, dtype=torch.int8), requires_grad=False)
    hooked.forward = lambda x: x
    modules = {
        "ours": RMSNorm(8),
        "layer_norm": nn.LayerNorm(8),
        "gated": gated,
        "own": LlamaRMSNorm(8),
        "two": nn.RMSNorm((2, 8)),
        "quantised": quantised,
        "hooked": hooked,
        "linear": nn.Linear(8, 8),
        "known": nn.RMSNorm(8),
    }
    model = nn.ModuleDict(modules)
    before = {name: type(module) for name, module in modules.items()}
    report = patch(model)
    assert [entry.name for entry in report.replaced] == ["known"]
    reasons = {entry.name: entry.text for entry in report.left}
    assert reasons.keys() == {"ours", "layer_norm", "gated", "own", "two", "quantised", "hooked"}
    assert "2 dimensions" in reasons["two"]
    assert "int8" in reasons["quantised"]
    assert "forward was replaced" in reasons["hooked"]
    assert "layer_norm" in str(report)
    assert all(type(modules[name]) is before[name] for name in reasons)
    assert {entry.text for entry in patch(model).left if entry.name == "known"} == {"it is patched already"}


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_can_be_copied_and_pickled(duplicate):
    module = nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 8))
    report = patch(module)
    twin = duplicate(module)
    assert type(twin[0]) is type(module[0])
    x = torch.randn(2, 8)
    assert torch.equal(twin(x), module(x))
    report.undo()
    assert type(module[0]) is nn.RMSNorm
    assert type(twin[0]) is not nn.RMSNorm


def test_a_class_of_ones_own_from_a_patched_one_is_copied_as_itself():
    module = nn.Sequential(nn.RMSNorm(8))
    patch(module)

    class Own(type(module[0])):
        pass

    twin = copy.deepcopy(Own(8))
    assert type(twin) is Own
    assert torch.equal(twin(torch.ones(2, 8)), module(torch.ones(2, 8)))


def test_a_release_of_kernels_that_transformers_does_not_take_is_named(monkeypatch):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.setattr("transformers.utils.import_utils.is_kernels_available", lambda: False)
    said = f"transformers {transformers.__version__} takes kernels>=[0-9.]+,<.*patch"
    with pytest.raises(ImportError, match=said):
        use_kernels()


OTHER_PATHS = {
    "class": lambda module: replaced(nn.RMSNorm, "forward", tripled),
    "function": lambda module: replaced(nn.functional, "rms_norm", tripled),
    "mode of functions": lambda module: FunctionMode(),
    "weight": lambda module: replaced(module, "weight", lambda weight: nn.Parameter(Packed(weight.detach()), False)),
}


@pytest.mark.parametrize("path", OTHER_PATHS)
def test_what_torch_would_see_or_change_is_left_to_torch(path):
    module, x = nn.RMSNorm(8), torch.randn(2, 8)
    expected = 3 * module(x)
    report = patch(module)
    with OTHER_PATHS[path](module), pytest.warns(UserWarning, match=r"the model \(RMSNorm\) computes without our operators"):
        assert torch.allclose(module(x), expected)
    assert len(report.fell_back) == 1
    assert torch.allclose(module(x), expected / 3)


def test_a_forward_of_the_class_that_was_replaced_is_kept():
    known = known_class("LlamaRMSNorm")
    patched, x = known(8), torch.ones(2, 8)
    report = patch(patched)
    with replaced(known, "forward", lambda forward: lambda self, hidden_states: 3 * hidden_states):
        with pytest.warns(UserWarning, match="forward of the class LlamaRMSNorm was replaced"):
            assert torch.equal(patched(x), 3 * x)
        assert "class LlamaRMSNorm was replaced" in patch(known(8)).left[0].text
    assert "class LlamaRMSNorm was replaced" in str(report)
    assert not torch.equal(patched(x), 3 * x)


@pytest.mark.parametrize(
    ("name", "given"), [("LlamaRMSNorm", "hidden_states"), ("MambaRMSNormGated", "hidden_states"), (None, "x")]
)
def test_arguments_by_name(name, given):
    module, x = known_class(name)(8) if name else nn.RMSNorm(8), torch.randn(2, 8)
    patch(module)
    assert torch.equal(module(**{given: x}), module(x))
    with pytest.raises(TypeError):
        module(rows=x)
